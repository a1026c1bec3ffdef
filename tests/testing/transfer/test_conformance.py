"""The conformance suites find what they promise to: wrong transports (unsound.py) fail, and the sound ones that they are made of pass."""

import fcntl
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.testing.transfer.unsound import SOUND, unsound

SOURCE = Path(__file__).with_name("unsound.py")
CASES = list(unsound())


def sound_twin(suite: type) -> type:
    return next(base for base in SOUND if issubclass(suite, base))


def run_all(report: Path) -> None:
    """One run of pytest for all cases, whose outcomes are in `report` from then on."""
    chosen = dict.fromkeys((kind, test) for suite, test in CASES for kind in (suite, sound_twin(suite)))
    nodes = [f"{SOURCE}::{kind.__name__}::{test}" for kind, test in chosen]
    unfinished = report.with_suffix(".unfinished")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={unfinished}", *nodes]
    subprocess.run(command, cwd=SOURCE.parents[3], capture_output=True, check=False)
    unfinished.rename(report)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[tuple[str, str], str]:
    """How each test ended: "passed", "failed", or "error" where its fixtures did, by (class, test). Workers of one session share them."""
    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent
    report = folder / "conformance.xml"
    with open(folder / "conformance.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            run_all(report)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = {"failure": "failed"}.get(kinds[0], kinds[0]) if kinds else "passed"
        found[case.attrib["classname"].rpartition(".")[2], case.attrib["name"]] = outcome
    return found


@pytest.mark.parametrize(("suite", "test"), CASES, ids=[f"{suite.__name__}-{test}" for suite, test in CASES])
def test_a_wrong_transport_fails_where_a_sound_one_passes(suite: type, test: str, outcomes: dict[tuple[str, str], str]) -> None:
    assert outcomes[suite.__name__, test] == "failed"
    assert outcomes[sound_twin(suite).__name__, test] == "passed"
