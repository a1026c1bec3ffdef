"""Scripted clusters of this folder's tests: nodes, and the Oracle that drives operations against them."""

from collections.abc import Iterator

import pytest

from tests.client.oracle import MakeOracle, Oracle, OracleNode, Pair


@pytest.fixture
def node() -> Iterator[OracleNode]:
    """Node 1, on this host."""
    node = OracleNode(1, local=True)
    yield node
    node.close()


@pytest.fixture
def remote() -> Iterator[OracleNode]:
    """Node 2, on another host, without a transfer engine."""
    node = OracleNode(2, local=False)
    yield node
    node.close()


@pytest.fixture
def nodes(node: OracleNode, remote: OracleNode) -> Pair:
    return node, remote


@pytest.fixture
def oracle(node: OracleNode) -> Oracle:
    """Of one node, on this host."""
    return Oracle(node)


@pytest.fixture
def far() -> OracleNode:
    """Node 2, on another host, with a transfer engine. A test that creates its Oracle must close it; `make_oracle` does."""
    return OracleNode(2, local=False, has_engine=True)


@pytest.fixture
def make_oracle() -> Iterator[MakeOracle]:
    """Oracles whose engine and nodes are closed at the end."""
    made: list[Oracle] = []

    def make(*nodes: OracleNode, engine_min_bytes: int = 50_000) -> Oracle:
        made.append(Oracle(*nodes, engine_min_bytes=engine_min_bytes))
        return made[-1]

    yield make
    for oracle in made:
        oracle.resources.close()
        for node in oracle.nodes.values():
            node.close()
