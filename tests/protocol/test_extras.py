"""Promises of protocol/extras.py."""

import re
import tomllib
from pathlib import Path

from kvstore.protocol.extras import install_line

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = [
    path
    for folder in ("client", "handover", "kvcache", "lab", "master", "protocol", "router", "rpc", "scheduler", "store", "tiers", "transfer")
    for path in (ROOT / folder).rglob("*.py")
]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]


def test_the_line_names_the_extra_and_where_to_run_it() -> None:
    assert install_line("ucx") == "pip install '.[ucx]' in the checkout of kvstore"


def test_every_extra_that_code_asks_for_exists() -> None:
    calls = re.compile(r"(?:install_line|need)\([^()]*?[\"'](\w+)[\"']\)")
    asked = {name for path in SOURCES for name in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"ucx", "nixl", "hbm", "router", "plots", "tokenizers"} <= asked <= set(PROJECT["optional-dependencies"])


def test_nothing_tells_a_reader_to_install_somebody_elses_package() -> None:
    """`kvstore` on the public index is not this project."""
    wrong = re.compile(r"pip install +['\"]?kvstore\b(?!-llm)|kvstore\[")
    assert [str(path) for path in [*SOURCES, *PAGES] if wrong.search(path.read_text(encoding="utf-8"))] == []
