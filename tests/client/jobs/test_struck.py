"""Signals whose handler raises, at any moment of a submission, a cancellation or a close."""

from pathlib import Path

from tests.client.processes import cluster
from tests.line_child import LineChild

SIGNALS = 300


def test_cancel_and_close_release_the_buffers(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "128MiB")
        with LineChild("tests.client.jobs.struck_jobs", started.address, str(SIGNALS)) as child:
            struck, wrong, works, left = child.answer()
    assert struck >= SIGNALS
    assert (wrong, works, left) == (0, True, 0)
