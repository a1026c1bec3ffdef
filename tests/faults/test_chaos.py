"""A short run of chaos, as `make chaos` makes a long one: it strikes, judges, reports, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import PREFIX, namespaces, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

PATIENT = ("--lease-s", "5", "--deadline-s", "60")
"""No call is late, and no daemon silent, for want of a processor."""
SPARING = ("--pause-s", "0.1")
"""Limits the clients' load to some hundred calls a second together; a higher load finds no more."""
RUN_S = 280.0


def run_chaos(out: Path, minutes: float, kinds: str) -> Any:
    """Return the report of a run with faults of these kinds."""
    command = [sys.executable, "-m", "tests.faults.chaos", "--minutes", str(minutes), "--seed", "5", "--out", str(out), *PATIENT, *SPARING]
    with subprocess.Popen([*command, "--kinds", kinds], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            said, _ = run.communicate(timeout=RUN_S)
        finally:
            run.kill()
    assert run.returncode == 0, said
    told = json.loads(out.read_text())
    assert told["is_good"]
    assert told["verdict"]["hits"] > 0
    assert sum(kind["made"] for kind in told["kinds"].values()) > 0
    assert not [name for name in namespaces() if name.startswith(f"{PREFIX}-{run.pid}-")], "others make some meanwhile"
    return told


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.slow
def test_chaos_of_several_faults_loses_nothing_promised(tmp_path: Path) -> None:
    run_chaos(tmp_path / "chaos.json", 0.25, "killed,point,partition,interrupted,forked")


@pytest.mark.promise("replicas-survive", "last-replica-last")
@pytest.mark.slow
def test_nodes_die_hang_and_fill_while_blocks_move(tmp_path: Path) -> None:
    moves = run_chaos(tmp_path / "chaos.json", 0.05, "moving")["moves"]
    assert moves
    assert all(of["home_copies before"] > 0 and of["demotions before"] > 0 for of in moves.values())
    assert all(of["pinned"] > 0 and of["found"] >= of["pinned"] + of["required"] for of in moves.values())
