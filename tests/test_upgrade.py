"""Promises of `make test-upgrade`: it finds the last release, and says that there is none while git has no tag."""

import subprocess
import sys
from pathlib import Path

from tests.upgrade.former_release import NO_RELEASE, ROOT, last_tag


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_last_tag_is_the_newest_behind_head(tmp_path: Path) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "one")
    assert last_tag(tmp_path) is None
    for tag in ("v1", "v2"):
        git(tmp_path, "tag", tag)
        git(tmp_path, "commit", "--allow-empty", "-m", f"after {tag}")
    assert last_tag(tmp_path) == "v2"


def test_target_says_in_one_line_that_there_is_no_release() -> None:
    if last_tag() is None:
        run = subprocess.run([sys.executable, "-m", "tests.upgrade"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert run.stdout == NO_RELEASE + "\n"
