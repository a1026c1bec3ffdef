"""Hooks of mkdocs: benchmarks/RESULTS.md, which lies outside docs/, becomes the page `results.md`, and links to it lead there."""

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS: Final = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"
PAGE: Final = "results.md"
TO_RESULTS: Final = re.compile(r"\]\((?:\.\./)+benchmarks/RESULTS\.md")
OUTSIDE: Final = re.compile(r"\]\(\.\./docs/")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page. Its links to docs/ are links to its neighbours."""
    text = OUTSIDE.sub("](", RESULTS.read_text(encoding="utf-8"))
    files.append(File.generated(config, PAGE, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the file to the page, from any depth of folders."""
    del config, files
    depth = page.file.src_uri.count("/")
    return TO_RESULTS.sub(f"]({'../' * depth}{PAGE}", markdown)
