"""Process groups end as a whole: by `end`, and by the death of the process that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvstore.testing.transfer.waiting import eventually
from tests.engines.live.environments import ROOT
from tests.engines.live.process_group import end, start

STUBBORN = "trap '' TERM; sleep 600 & sleep 600 & echo $$ $!; wait"
"""A leader and children that ignore SIGTERM. It prints the pids of the leader and of one child."""
STARTER = f"""
import sys
from tests.engines.live.process_group import start
start(["bash", "-c", {STUBBORN!r}], stdout=sys.stdout)
print("watched", flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    """A zombie, which its parent has not waited for, does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_of(process: "subprocess.Popen[str]", *, other_lines: int = 0) -> list[int]:
    """Pids of the group. They and the other lines are read, in either order."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(1 + other_lines)]
    pids = [int(word) for line in lines for word in line.split() if word.isdigit()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    return pids


def test_end_kills_children_that_outlive_the_leader() -> None:
    process = start(["bash", "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    with process:
        pids = pids_of(process)
        os.kill(pids[0], signal.SIGKILL)
        end(process, patience_s=60)
    eventually(lambda: not any(is_running(pid) for pid in pids), "all of the group have ended")


def test_group_ends_with_a_starter_that_is_killed() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as starter:
        pids = pids_of(starter, other_lines=1)
        starter.kill()
    eventually(lambda: not any(is_running(pid) for pid in pids), "all of the group have ended")
