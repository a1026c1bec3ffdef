"""A short run of chaos, as `make chaos` makes a long one: it strikes, judges, reports, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import PREFIX, namespaces, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

PATIENT = ("--lease-s", "5", "--deadline-s", "60")
"""No call is late, and no daemon silent, for want of a processor."""
SPARING = ("--pause-s", "0.1")
"""Limits the clients' load to some hundred calls a second together; a higher load finds no more."""
RUN_S = 280.0


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.slow
def test_chaos_of_several_faults_loses_nothing_promised(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.faults.chaos", "--minutes", "0.25", "--seed", "5", "--out", str(out), *PATIENT, *SPARING]
    kinds = ("--kinds", "killed,point,partition,interrupted,forked")
    with subprocess.Popen([*command, *kinds], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
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
