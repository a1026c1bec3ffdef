"""Releases before this one, as trees that processes of the tests import kvstore from: taken out of git, once a checkout."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
COMMITS: Final = {
    3: "2bd4c5050c97b597d46e87c3c9de4a4e01fd7095",
    4: "380a90dbcf2d8b08848b71c34401f6e09fca0d11",
    5: "fd925f7d776d2d754ab1acf10e5abb3b9fb5c3c5",
}
"""The last one of each protocol version that this release reads, but for its own."""


def tree(version: int) -> Path:
    """What goes into PYTHONPATH. Raises CalledProcessError where git does not have the commit."""
    commit = COMMITS[version]
    folder = ROOT / "build" / "releases" / commit[:7]
    if not (folder / "made").exists():
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder / "kvstore", filter="data")
        (folder / "made").touch()
    return folder


def start(release: Path | None, *arguments: str, log: Path) -> subprocess.Popen[str]:
    """A Python program of the tests' own environment, of this release (None) or of the tree's."""
    environment = {"PYTHONPATH": str(release)} if release is not None else {"PYTHONPATH": str(ROOT / "build" / "typing")}
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, *arguments], env={"PATH": "/usr/bin:/bin", **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
