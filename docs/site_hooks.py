"""mkdocs hooks that include benchmarks/RESULTS.md, which is outside docs/, as the page `results.md`, and rewrite links to it."""

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
    """Add the page, with its links to docs/ made relative."""
    text = OUTSIDE.sub("](", RESULTS.read_text(encoding="utf-8"))
    files.append(File.generated(config, PAGE, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to the file as links to the page, for any folder depth."""
    del config, files
    depth = page.file.src_uri.count("/")
    return TO_RESULTS.sub(f"]({'../' * depth}{PAGE}", markdown)
