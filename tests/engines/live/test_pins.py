"""The wheel beside what engines pin: pip finds no conflict, all of kvstore can be imported, and a cluster of it serves."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.live.environments import FOLDER, python_of

PROGRAM = Path(__file__).with_name("pinned.py")
EXTRAS = {"aiohttp", "matplotlib", "torch", "triton", "hypothesis", "pytest"}
"""What modules of an extra, and the suites for new tiers and transports, may lack: the wheel was installed without any."""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("pins")


def test_pip_finds_that_all_requirements_are_met(python: Path) -> None:
    subprocess.run([python, "-m", "pip", "check"], check=True)


def test_the_wheel_runs_with_the_oldest_versions_that_engines_pin(python: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-W", "error", PROGRAM], stdout=subprocess.PIPE, check=True, cwd=FOLDER, env=environment)
    facts = json.loads(done.stdout)
    assert Path(facts["path"]).is_relative_to(FOLDER / "pins")
    assert (facts["versions"]["grpcio"], facts["versions"]["numpy"]) == ("1.78.0", "2.2.6")
    assert facts["versions"]["protobuf"].startswith("6.")
    assert set(facts["lacking"].values()) <= EXTRAS, facts["lacking"]
    assert "kvstore.router.app" in facts["lacking"]
    assert facts["works"]
