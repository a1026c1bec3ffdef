"""Promises of drain.py: what it says of each state a drain may be in, and when it ends. The way through: system/test_leaving.py."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.drain import progress
from kvstore.cli.main import kvstore
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import DeleteBlocks
from tests.client.stub_control import stub_controls
from tests.master.blocks import Event, publish
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread
from tests.rpc.stub_masters import stub_masters


def run(master: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["drain", *arguments, "--master", master])
    return result.exit_code, result.output


def status(state: str = "alive", **drain: int | bool | str) -> pb.NodeStatus:
    return pb.NodeStatus(name="n1", state=state, drain=pb.DrainStatus(**drain))  # type: ignore[arg-type]


def test_a_node_that_there_is_not_is_refused(master: str) -> None:
    assert run(master, "far") == (2, "kvstore: error: there is no node 'far'; there are: node-0\n")
    assert run(master, "far", "--cancel") == (2, "kvstore: error: there is no node 'far'; there are: node-0\n")


def test_it_begins_waits_and_is_cancelled(master: str) -> None:
    assert run(master, "node-0", "--no-wait") == (0, "node-0 is being drained: kvstore status shows the progress\n")
    assert "node-0" in CliRunner().invoke(kvstore, ["status", "--master", master]).output
    code, said = run(master, "node-0", "--to", "nvme")
    assert (code, said.splitlines()[-1]) == (0, "node-0 is drained: no block is in its memory only, and it can be stopped")
    assert run(master, "node-0", "--cancel") == (0, "node-0 accepts blocks again\n")


def test_drain_waits_across_a_failover_and_ignores_followers() -> None:
    """A follower has no nodes in its status, which would look like a finished or cancelled drain."""

    def told(**drain: Any) -> pb.StatusReply:
        return pb.StatusReply(role="owner", nodes=[pb.NodeStatus(name="n1", drain=pb.DrainStatus(to="peers", **drain))])

    said = [
        told(remaining_blocks=500),
        pb.StatusReply(role="following"),
        pb.StatusReply(role="following"),
        told(remaining_blocks=400),
        told(is_done=True),
    ]
    with stub_controls(told()) as (control,), stub_masters(1) as (master,):
        control.says_status = lambda: said.pop(0)
        master.control = control.place
        code, output = run(master.address, "n1")
    assert code == 0, output
    assert [line.split(":")[1].split()[0] for line in output.splitlines()] == ["500", "400", "no"]
    assert not said


def test_it_does_not_wait_for_ever_for_a_master_that_tells() -> None:
    with stub_controls(pb.StatusReply(role="following")) as (control,), stub_masters(1) as (master,):
        master.control = control.place
        code, output = run(master.address, "n1", "--deadline-s", "0.5")
        assert (code, output) == (2, "kvstore: error: this master does not own partition 0 any more: retry, to find its new owner\n")
        code, output = run(master.address, "n1", "--wait-s", "0.1")
        assert (code, output) == (2, "kvstore: error: n1 is not drained after 0.1 s; the drain continues\n")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (status(), "n1: searching for blocks that only its memory has"),
        (status(remaining_blocks=1000, copying_blocks=20), "n1: 1,000 blocks left in its memory only; 20 are being copied"),
        (
            status(remaining_blocks=2, lacks_space=True),
            "n1: 2 blocks left in its memory only (no node has free space); 0 are being copied",
        ),
        (
            status(nvme_only_blocks=3, lacks_space=True),
            "n1: 0 blocks left in its memory only; 3 blocks are on its NVMe only, until it is restarted; 0 are being copied",
        ),
        (status("dead", remaining_blocks=2), "n1 is dead: its drain continues when it is started again"),
        (
            status(is_done=True, nvme_only_blocks=3),
            "n1 is drained: no block is in its memory only, and it can be stopped; 3 blocks are on its NVMe only, until it is restarted",
        ),
    ],
)
def test_each_state_has_its_line(node: pb.NodeStatus, said: str) -> None:
    assert progress(node) == said


def run_forget(places: Places, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["forget", *arguments, "--master", places.listen])
    return result.exit_code, result.output


def states(places: Places) -> dict[str, str]:
    with places.stub() as stub:
        return {node.name: node.state for node in stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes}


@pytest.mark.promise("remove-stays-removed")
@pytest.mark.parametrize("catalog", ["memory:", "lmdb:"])
def test_forget_dead_node_rejoins_as_new_without_blocks(tmp_path: Path, catalog: str) -> None:
    catalog += str(tmp_path / "catalog") if catalog == "lmdb:" else ""
    with master_in_thread(tmp_path, catalog=catalog, node_ttl_s=60.0) as places:
        node = NodeSide(places)
        node.sync(Event(b"a"))
        assert run_forget(places, "one") == (2, "kvstore: error: node 'one' is alive, at t:1: stop it before it is forgotten\n")
        node.close()
        while states(places) != {"one": "dead"}:
            pass
        assert run_forget(places, "two") == (2, "kvstore: error: there is no node 'two'; there are: one\n")
        assert run_forget(places, "one") == (0, "one is forgotten\n")
        assert states(places) == {}
        node = NodeSide(places)
        assert node.registration.node_id == 2
        header, body = node.ask(publish(node.registration.registration_epoch, [Event(b"a")]))
        drop = DeleteBlocks.unpack(memoryview(body))
        assert (header.type, drop.keys, drop.force) == (DeleteBlocks.TYPE, [b"a"], 1)
        with places.stub() as stub:
            assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).blocks == 0
        node.close()
