"""Promises of drain.py: what it says of each state a drain may be in, and when it ends. The way through: system/test_leaving.py."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from kvstore.client.cli.drain import progress
from kvstore.client.cli.main import kvstore
from kvstore.protocol import control_pb2 as pb
from tests.client.embedded import embedded


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


def run(master: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["drain", *arguments, "--master", master])
    return result.exit_code, result.output


def status(state: str = "alive", **drain: int | bool | str) -> pb.NodeStatus:
    return pb.NodeStatus(name="n1", state=state, drain=pb.DrainStatus(**drain))  # type: ignore[arg-type]


def test_a_node_that_there_is_not_is_refused(master: str) -> None:
    assert run(master, "far") == (2, "kvstore: error: there is no node 'far'; there are: node-0\n")
    assert run(master, "far", "--cancel") == (2, "kvstore: error: there is no node 'far'; there are: node-0\n")


def test_it_begins_waits_and_is_cancelled(master: str) -> None:
    assert run(master, "node-0", "--no-wait") == (0, "node-0 is being drained: kvstore status shows how far it is\n")
    assert "node-0" in CliRunner().invoke(kvstore, ["status", "--master", master]).output
    code, said = run(master, "node-0", "--to", "nvme")
    assert (code, said.splitlines()[-1]) == (0, "node-0 is drained: nothing is left that would be missed, it can be stopped")
    assert run(master, "node-0", "--cancel") == (0, "node-0 takes blocks again\n")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (status(), "n1: looking for what only its memory has"),
        (status(left_blocks=1000, copying_blocks=20), "n1: 1,000 blocks left that only its memory has; 20 on their way"),
        (status(left_blocks=2, lacks_room=True), "n1: 2 blocks left that only its memory has, no node has room for them; 0 on their way"),
        (
            status(kept_blocks=3, lacks_room=True),
            "n1: 0 blocks left that only its memory has; 3 blocks are on its NVMe only, and come back with it; 0 on their way",
        ),
        (status("dead", left_blocks=2), "n1 is dead: what only it has cannot be copied before it is back"),
        (
            status(is_done=True, kept_blocks=3),
            "n1 is drained: nothing is left that would be missed, it can be stopped; 3 blocks are on its NVMe only, and come back with it",
        ),
    ],
)
def test_each_state_has_its_line(node: pb.NodeStatus, said: str) -> None:
    assert progress(node) == said
