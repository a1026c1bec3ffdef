"""Builds the documentation site in FOLDER or build/site: python docs/make_site.py [FOLDER]. Fails for broken links.

The library's reference is generated from docstrings, the command line's from its commands. mkdocstrings follows symbolic links, so it gets
a folder without build/typing, which contains the whole project again.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ROOT / "build" / "packages"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    show_packages()
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    raise SystemExit(subprocess.run([*command, "--site-dir", str(folder)], env=environment, check=False).returncode)


def show_packages() -> None:
    """Create symbolic links to all packages in build/packages/kvstore."""
    (PACKAGES / "kvstore").mkdir(parents=True, exist_ok=True)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in {package.split(".")[1] for package in packages if "." in package}:
        link = PACKAGES / "kvstore" / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)


if __name__ == "__main__":
    main()
