"""One build and one environment for all of these tests."""

from pathlib import Path

import pytest

from tests.packages.installed import built, installed


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def commands(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = dist.glob("*.whl")
    return installed(tmp_path_factory.mktemp("installed") / "env", str(wheel))
