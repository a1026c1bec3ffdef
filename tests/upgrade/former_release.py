"""The last tagged release, as a tree that processes of the tests import kvstore from: taken out of git, once a checkout."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
NO_RELEASE: Final = "there is no release yet: git has no tag to compare this checkout with"


def last_tag(repository: Path = ROOT) -> str | None:
    """Return the newest tag behind HEAD, None where there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "HEAD"]
    found = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def tree(tag: str) -> Path:
    """Return what goes into PYTHONPATH for the release. Raises CalledProcessError where git does not have the tag."""
    folder = ROOT / "build" / "releases" / tag.replace("/", "-")
    if not (folder / "made").exists():
        archive = subprocess.run(["git", "archive", tag], cwd=ROOT, check=True, capture_output=True).stdout
        (folder / "kvstore").mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", str(folder / "kvstore")], input=archive, check=True)
        (folder / "made").touch()
    return folder


def start(release: Path | None, *arguments: str, log: Path) -> subprocess.Popen[str]:
    """Start a Python program of the tests' own environment, of this release (None) or of the tree's."""
    environment = {"PYTHONPATH": str(release)} if release is not None else {"PYTHONPATH": str(ROOT / "build" / "typing")}
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, *arguments], env={"PATH": "/usr/bin:/bin", **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
