"""The wheel beside what each engine pins: its requirements are met, all of it can be imported, and a cluster of it serves.

"pins" is an environment of the oldest versions that any engine pins, without the engine: a minute to make and to test.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.live.environments import ENVIRONMENTS, FOLDER, python_of

PROGRAM = Path(__file__).with_name("pinned.py")
EXTRAS = {"cryptography", "matplotlib", "opentelemetry", "torch", "triton", "hypothesis", "pytest", "tokenizers"}
"""Packages that modules of an extra and the suites for new tiers and transports may lack.

The wheel was installed without any extra.
"""

EVERY_ENGINE = pytest.mark.parametrize("engine", ENVIRONMENTS)


@EVERY_ENGINE
def test_pip_finds_that_its_requirements_are_met(engine: str) -> None:
    """The check ignores the engine's own missing packages, which exist for CUDA only."""
    done = subprocess.run([python_of(engine), "-m", "pip", "check"], stdout=subprocess.PIPE, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("kvstore-llm ")] == []


@EVERY_ENGINE
def test_the_wheel_runs_with_the_versions_that_the_engine_pins(engine: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python_of(engine), PROGRAM], stdout=subprocess.PIPE, check=True, cwd=FOLDER, env=environment)
    facts = json.loads(done.stdout)
    assert Path(facts["path"]).resolve().is_relative_to((FOLDER / engine).resolve())
    assert {name.partition(".")[0] for name in facts["lacking"].values()} <= EXTRAS, facts["lacking"]
    assert facts["works"]
    if engine == "pins":
        assert (facts["versions"]["grpcio"], facts["versions"]["numpy"]) == ("1.78.0", "2.2.6")
        assert facts["versions"]["protobuf"].startswith("6.")
        assert "kvstore.testing.tier_conformance" in facts["lacking"], "it was installed without extras"
