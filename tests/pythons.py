"""The wheel on each Python that the project supports: client, node and signal suites, in an environment of each interpreter.

`python -m tests.pythons [3.N...]` runs those named, or all supported ones. Environments lie in build/pythons and are reused; one is made
again when what it was made of has changed. A supported Python that this machine lacks is named, and is no failure.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from tests.engines.live.environments import MADE, ROOT, TORCH, wheel

FOLDER: Final = ROOT / "build" / "pythons"
SUITES: Final = (
    "tests/client",
    "tests/store",
    "tests/transfer/memory/test_event_signals.py",
    "tests/handover/test_signals.py",
    "tests/router/test_signals.py",
    "tests/telemetry/test_routes.py",
    "tests/transfer/memory/test_signal_safety.py",
    "tests/transfer/test_signals.py",
)
"""Tests that depend most on the interpreter: threads, forks, ctypes, buffers, and where a signal's handler may run."""
_PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_MARK: Final = "Programming Language :: Python :: 3."


def supported() -> list[str]:
    """Releases of Python that the wheel's classifiers name: 3.N."""
    return [f"3.{name.removeprefix(_MARK)}" for name in _PROJECT["classifiers"] if name.startswith(_MARK)]


def find(release: str) -> Path | None:
    """An interpreter of that release with venv: Debian's, one on the PATH, or pyenv's. None if this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{release}")
    candidates = [Path(f"/usr/bin/python{release}"), *([Path(on_path)] if on_path else [])]
    for python in (*candidates, *sorted(pyenv.glob(f"{release}.*/bin/python"))):
        told = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        # A shim of pyenv's is on the PATH for each release that it has, and fails unless that one is chosen.
        if python.exists() and _said(python, told) == release:
            return python
    return None


def make(release: str, interpreter: Path) -> Path:
    """Return the Python of the environment of `release`, with the test tools and this checkout's wheel."""
    folder = FOLDER / release
    python = folder / "bin" / "python"
    packages = [*_PROJECT["dependencies"], *_PROJECT["optional-dependencies"]["dev"]]
    version = _said(interpreter, "import sys; print(sys.version)")
    identity = hashlib.sha256(repr((TORCH, packages, version)).encode()).hexdigest()
    made = folder / MADE
    if not made.exists() or made.read_text() != identity:
        print(f"installing the test tools for Python {release} into {folder.relative_to(ROOT)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        _pip(python, TORCH)
        _pip(python, *packages)
        made.write_text(identity)
    _pip(python, "--no-deps", "--force-reinstall", str(wheel()))
    return python


def run(python: Path) -> int:
    """The exit status of pytest in that environment."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "worksteal", "-n", str(os.cpu_count() or 1)]
    return subprocess.run([*command, *SUITES], cwd=ROOT, check=False).returncode


def _said(python: Path, program: str) -> str:
    done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip()


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *arguments], check=True)


def main() -> int:
    """Exit status 1 if a suite failed on any Python."""
    status = 0
    for release in sys.argv[1:] or supported():
        interpreter = find(release)
        if interpreter is None:
            print(f"this machine has no Python {release} with venv: its suites were not run", flush=True)
            continue
        print(f"Python {release}: {interpreter}", flush=True)
        status |= run(make(release, interpreter)) != 0
    return status


if __name__ == "__main__":
    sys.exit(main())
