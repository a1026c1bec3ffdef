"""The image: linted, not root's, and made of every package that there is."""

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.deploy.rendering import DEPLOY

IMAGE = DEPLOY / "image"


def test_the_dockerfile_has_nothing_that_hadolint_would_change() -> None:
    done = subprocess.run([Path(sys.prefix, "bin", "hadolint"), IMAGE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_nothing_runs_as_root() -> None:
    lines = (IMAGE / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last_stage


def test_every_package_is_sent_to_the_builder() -> None:
    packaging = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    sent = {line.removeprefix("!/") for line in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!/")}
    assert set(packaging["package-dir"].values()) <= sent
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sent
