"""The package `mooncake` that is kvstore, installed as a user installs it, but into a folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.engines.live.environments import ROOT

DISTRIBUTION: Final = ROOT / "engines" / "mooncake" / "distribution"


def install(folder: Path) -> str:
    """Install it below `folder`: the search path of modules for programs that are to find it."""
    source, target = folder / "source", folder / "installed"
    shutil.copytree(DISTRIBUTION, source)  # a build leaves files beside the sources
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", target, source], check=True)
    return os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
