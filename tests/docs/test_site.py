"""Promises of docs/make_site.py: the pages are made without a link to nowhere, every page is in the navigation, none of them needs another
host, and all of them work from files."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import BrowserContext

from tests.console.browser import chromium
from tests.docs.shell_blocks import ROOT, code

pytestmark = pytest.mark.slow

LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+rel=["']?(?:stylesheet|preconnect)["']?[^>]+href=["']?(?:https?:)?//"""
)
OF_SERVERS = "404.html"
"""A page that only a server shows, from any folder: its links are absolute."""


class _Anchors(HTMLParser):
    """Ids of a page, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


def broken(links: dict[Path, _Anchors]) -> list[tuple[str, str]]:
    """Links to files or anchors that do not exist, each with its page's name."""
    found = []
    for page, anchors in links.items():
        for link in anchors.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            is_there = target.is_file() and (not parts.fragment or target not in links or unquote(parts.fragment) in links[target].ids)
            if not is_there:
                found.append((page.name, link))
    return sorted(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run([sys.executable, str(ROOT / "docs/make_site.py"), str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_every_page_is_made_and_in_the_navigation(site: Path) -> None:
    pages = sorted(page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []
    assert [page for page in pages if not re.search(rf"- {re.escape(str(page))}$", navigation, re.MULTILINE)] == []


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if LOADED.search(page.read_text())] == []


def test_the_reference_has_what_programs_of_the_pages_import(site: Path) -> None:
    """Those between fences; what is indented are pieces for whoever works on transports and estimators."""
    library = (site / "reference" / "api.html").read_text()
    shown = set(re.findall(r'id="(kvstore[.\w]+)"', library))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for program in code(page, "python"):
            for module, names in re.findall(r"^from (kvstore[\w.]*) import (.+)$", program, re.MULTILINE):
                for name in re.findall(r"\w+", names.partition("#")[0]):
                    assert module in ("kvstore", "kvstore.client") or f"{module}.{name}" in shown, f"{page.name}: {module}.{name}"


def test_no_link_of_the_site_leads_nowhere(site: Path) -> None:
    pages = {page.resolve(): _Anchors(page.read_text()) for page in site.rglob("*.html") if page.name != OF_SERVERS}
    assert broken(pages) == []
    assert len(pages) > 20
    assert sum(len(anchors.links) for anchors in pages.values()) > 1000


def test_links_of_the_checkout_lead_to_files_that_exist() -> None:
    """Those of pages that are read without the site: README.md, ARCHITECTURE.md, deploy/ and benchmarks/."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = []
    for name in listed:
        text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(link)
            if not parts.scheme and parts.path and not ((ROOT / name).parent / unquote(parts.path)).exists():
                found.append((name, link))
    assert found == []
