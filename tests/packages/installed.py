"""The distribution as a stranger has it: built from the sources alone, and installed into an environment in which there is nothing else.

The packages that it requires are those of this environment, by a .pth file: to install them anew would need an index and a minute.
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
    """The folder with the wheel and the sdist; the wheel is made of the sdist."""
    dist = folder / "dist"
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copied(folder / "sources")))
    return dist


def copied(sources: Path) -> Path:
    """What the distribution is built from: to build beside the checkout's own files would leave more files there."""
    sources.mkdir(parents=True)
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in packaging["package-dir"].values():
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, sources)
    return sources


def installed(folder: Path, *what: str) -> Path:
    """The folder of the commands of a new environment in which pip has installed a wheel, or whatever else it is told to."""
    ran(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--disable-pip-version-check")
    # What this environment has of kvstore is not what is asked for.
    ran(*pip, "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", *what)
    return folder / "bin"


def ran(*command: str, cwd: Path | None = None) -> str:
    """What a program says that knows nothing of this checkout; it must end well."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout
