"""Tests of make_site.py: no link leads nowhere, every page is in the navigation, none loads anything from another host."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.shell_blocks import ROOT, code

pytestmark = pytest.mark.slow

LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+rel=["']?(?:stylesheet|preconnect)["']?[^>]+href=["']?(?:https?:)?//"""
)


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
    """Only fenced programs: indented ones are fragments for developers of transports and estimators."""
    library = (site / "reference" / "api.html").read_text()
    shown = set(re.findall(r'id="(kvstore[.\w]+)"', library))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for program in code(page, "python"):
            for module, names in re.findall(r"^from (kvstore[\w.]*) import (.+)$", program, re.MULTILINE):
                for name in re.findall(r"\w+", names.partition("#")[0]):
                    assert module in ("kvstore", "kvstore.client") or f"{module}.{name}" in shown, f"{page.name}: {module}.{name}"


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
