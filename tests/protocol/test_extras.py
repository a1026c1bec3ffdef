"""Promises of protocol/extras.py."""

import re
import tomllib
from pathlib import Path

from kvstore.protocol.extras import install_line

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"].values()
SOURCES = [path for folder in (*PACKAGES, "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]


def test_the_line_names_the_extra_and_where_to_run_it() -> None:
    assert install_line("ucx") == "pip install '.[ucx]' in the checkout of kvstore"


def test_every_extra_that_code_asks_for_exists() -> None:
    calls = re.compile(r"(?:install_line|need)\([^()]*?[\"'](\w+)[\"']\)")
    asked = {name for path in SOURCES for name in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"ucx", "nixl", "hbm", "plots"} <= asked <= set(PROJECT["optional-dependencies"])


def test_every_extra_that_a_line_to_install_names_exists() -> None:
    named = re.compile(r"pip install '?\.\[([\w,]+)\]")
    lines = [found for path in (*SOURCES, *PAGES) for found in named.findall(path.read_text(encoding="utf-8"))]
    extras = {extra for line in lines for extra in line.split(",")}
    assert {"ucx", "hbm", "examples", "sidecar"} <= extras <= set(PROJECT["optional-dependencies"])


def test_it_is_not_called_as_somebody_elses_package() -> None:
    assert PROJECT["name"] == "kvstore-llm"


def test_no_text_installs_the_other_kvstore_package() -> None:
    """`kvstore` on the public index is not this project."""
    wrong = re.compile(r"pip install +['\"]?kvstore\b(?!-llm)|kvstore\[")
    assert [str(path) for path in [*SOURCES, *PAGES] if wrong.search(path.read_text(encoding="utf-8"))] == []
