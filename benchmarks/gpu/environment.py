"""Environment of `make gpu`: the packages that the interpreter lacks, beside its own torch. Standard library only.

- The interpreter may itself be of a virtual environment, whose packages `venv --system-site-packages` would not show. So
  the new environment names the folders of the interpreter's packages in a .pth file. pip then installs only what they
  lack, or have too old.
- The project needs no build: links in the layout of the distribution make it importable.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "build" / "gpu"
TESTS: Final = ("hypothesis>=6.100", "msgspec>=0.19", "pytest>=8", "pytest-timeout>=2.2", "pytest-xdist>=3.5", "pyzmq>=26")
SECONDS: Final = 150
"""Deadline of each command."""


def prepare(wheels: Path | None) -> tuple[str, dict[str, str]]:
    """Return the environment's Python and its variables. `wheels`: folder to install from, in place of the index.

    Exits with a message if the interpreter has no torch, or pip cannot install what is lacking.
    """
    torch = _run(sys.executable, "-c", "import torch; print(torch.__version__)")
    if torch.returncode:
        sys.exit(f"make gpu uses the torch of its interpreter, and {sys.executable} has none: give PYTHON=... one that has")
    project = read_project()
    needed = requirements(project)
    source = FOLDER / "source"
    _link(source, project["tool"]["setuptools"]["package-dir"])
    python, packages = _environment(needed, wheels)
    paths = [*packages, str(source), str(ROOT)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTEST_"))}
    variables.setdefault("OMP_NUM_THREADS", "1")  # its threads would spin for one another
    return python, variables | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(project: dict[str, Any]) -> list[str]:
    """Packages that the project and its tests on the device need, but torch."""
    return [*project["project"]["dependencies"], *TESTS]


def _environment(needed: list[str], wheels: Path | None) -> tuple[str, list[str]]:
    """Return a Python with the needed packages, and folders for its path."""
    folder, made = FOLDER / "env", FOLDER / "made"
    identity = hashlib.sha256(repr((needed, sys.version, sys.executable, sys.path)).encode()).hexdigest()
    target = FOLDER / "packages"
    if not made.exists() or made.read_text() != identity:
        for old in (folder, target):
            shutil.rmtree(old, ignore_errors=True)
        made.unlink(missing_ok=True)
        print(f"installing what {sys.executable} (Python {platform.python_version()}) lacks into {FOLDER.relative_to(ROOT)}", flush=True)
        is_venv = not _run(sys.executable, "-m", "venv", "--without-pip", str(folder)).returncode
        if is_venv:
            [own] = folder.glob("lib/python*/site-packages")
            (own / "interpreter.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in _package_folders()))
            where = ("--python", str(folder / "bin" / "python"), "install")
        else:
            # pip then installs all requirements, also those that the interpreter has.
            where = ("install", "--target", str(target))
        source = ("--no-index", "--find-links", str(wheels)) if wheels else ()
        _install(where, source, needed)
        made.write_text(identity)
    is_venv = (folder / "bin" / "python").exists()
    return (str(folder / "bin" / "python"), []) if is_venv else (sys.executable, [str(target)])


def _install(where: tuple[str, ...], source: tuple[str, ...], needed: list[str]) -> None:
    """Install by the interpreter's pip. Exits with pip's last lines."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    done = _run(*pip, *where, "-q", "--no-compile", *source, *needed)
    if done.returncode:
        names = " ".join(sorted(re.split(r"[<>=]", each)[0] for each in needed))
        sys.exit(
            f"{done.stdout[-2000:]}\nmake gpu could not install its packages; without an index give WHEELS=FOLDER with wheels of {names}"
        )


def _package_folders() -> list[str]:
    return [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages") and Path(place).is_dir()]


def _link(folder: Path, packages: dict[str, str]) -> None:
    """Lay out `folder` as the distribution installs the project, by links to this checkout."""
    shutil.rmtree(folder, ignore_errors=True)
    top = folder / "kvstore"
    top.mkdir(parents=True)
    for name, place in packages.items():
        if name == "kvstore":
            for file in (ROOT / place).iterdir():
                (top / file.name).symlink_to(file)
        else:
            (top / name.removeprefix("kvstore.")).symlink_to(ROOT / place)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to the deadline, which is status 124."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, f"{command[:4]} took over {SECONDS} s: {late.stdout!r}")


if __name__ == "__main__":
    print(*requirements(read_project()))
