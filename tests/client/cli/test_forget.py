"""Promises of forget.py, through the command, against a real master."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.client.cli.main import kvstore
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Drop
from tests.master.blocks import Event, publish
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread


def run(places: Places, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["forget", *arguments, "--master", places.listen])
    return result.exit_code, result.output


def states(places: Places) -> dict[str, str]:
    with places.stub() as stub:
        return {node.name: node.state for node in stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes}


@pytest.mark.parametrize("catalog", ["memory:", "lmdb:"])
def test_a_dead_node_is_forgotten_and_comes_back_as_a_new_one_without_its_blocks(tmp_path: Path, catalog: str) -> None:
    catalog += str(tmp_path / "catalog") if catalog == "lmdb:" else ""
    with master_in_thread(tmp_path, catalog=catalog, node_ttl_s=60.0) as places:
        node = NodeSide(places)
        node.sync(Event(b"a"))
        assert run(places, "one") == (2, "kvstore: error: node 'one' is alive, at t:1: stop it before it is forgotten\n")
        node.close()
        while states(places) != {"one": "dead"}:
            pass
        assert run(places, "two") == (2, "kvstore: error: there is no node 'two'; there are: one\n")
        assert run(places, "one") == (0, "one is forgotten\n")
        assert states(places) == {}
        node = NodeSide(places)
        assert node.registration.node_id == 2
        header, body = node.ask(publish(node.registration.registration_epoch, [Event(b"a")]))
        drop = Drop.unpack(memoryview(body))
        assert (header.type, drop.keys, drop.force) == (Drop.TYPE, [b"a"], 1)
        with places.stub() as stub:
            assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).blocks == 0
        node.close()
