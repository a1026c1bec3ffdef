"""What the calls of a client share, as its settings make it."""

from collections.abc import Iterator

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.resources import ClientResources, maps_memory
from kvstore.transfer.config import TransferSettings
from tests.client.oracle import MASTER, Oracle, OracleNode, is_here


@pytest.fixture
def node() -> Iterator[OracleNode]:
    node = OracleNode(1, local=True)
    yield node
    node.close()


@pytest.mark.parametrize(
    ("transports", "maps"), [("auto", True), ("tcp, shm", True), ("shm", True), ("tcp", False), ("ucx,nixl", False), ("my:shm", False)]
)
def test_a_client_maps_memory_unless_its_transports_leave_it_out(node: OracleNode, transports: str, maps: bool) -> None:
    transfer = TransferSettings(transports=transports)
    assert maps_memory(transfer) is maps
    oracle = Oracle(node)
    oracle.resources = ClientResources(MASTER, ClientSettings(), transfer, is_here=is_here, spread=0)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    assert oracle.resources.daemons.nodes.is_local(1) is maps
