"""The distribution as a user gets it: built from the sources alone, and installed into an empty environment.

Its requirements come from this environment through a .pth file: installing them would need an index and a minute.
"""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = ("pyproject.toml", "README.md", "LICENSE")


def built(folder: Path) -> Path:
    """Build the sdist, and the wheel from it; return their folder."""
    dist = folder / "dist"
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copied(folder / "sources")))
    return dist


def copied(sources: Path) -> Path:
    """Copy the sources of the distribution, because a build leaves files beside them."""
    sources.mkdir(parents=True)
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in packaging["package-dir"].values():
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, sources)
    return sources


def installed(folder: Path, *what: str) -> Path:
    """Create an environment, install `what` with pip, and return its bin folder."""
    ran(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--disable-pip-version-check")
    # --ignore-installed: this environment has kvstore, too.
    ran(*pip, "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", *what)
    return folder / "bin"


def ran(*command: str, cwd: Path | None = None) -> str:
    """Run a program without this checkout's environment; it must succeed. Returns its output."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout
