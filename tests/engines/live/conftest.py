"""Time limit of tests with real engines, and what several folders of them share: a model, and vLLM servers behind a router."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.client.embedded import embedded
from tests.engines.live.environments import ROOT
from tests.engines.live.router.fleet import Fleet

PLAN: Final = ClusterPlan(dram="128MiB", is_private=True)
LIMIT_S: Final = 1800
"""Several engines begin within one test, each of which takes minutes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def make_model(tmp_path_factory: pytest.TempPathFactory, *what: str) -> Path:
    """By a process of its own: what makes it takes seconds to load. Engines of it write their logs beside it."""
    folder = tmp_path_factory.mktemp("engines") / "model"
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", folder, *what], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory, "tiny")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with embedded(PLAN) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    """With the options that FLEET of the test's module names."""
    with Fleet(tmp_path_factory.mktemp("fleet"), model, **request.module.FLEET) as running:
        yield running
