"""Puts to a scripted cluster."""

from collections.abc import Sequence

from kvstore.client.core.buffers import as_sources
from kvstore.client.writes.batch_put import BatchPut
from kvstore.rpc.deadline import Deadline
from tests.client.oracle import Oracle


def put(
    oracle: Oracle, keys: Sequence[bytes], values: Sequence[bytes], deadline_s: float = 5.0, *, acks_at_node: bool = False
) -> list[bool]:
    """Checks that no connection stays lent, however it ends."""
    sources = as_sources(values)
    writing = BatchPut(
        oracle.resources, keys, sources, namespace="ns", parents=None, acks_at_node=acks_at_node, deadline=Deadline(deadline_s)
    )
    try:
        result: list[bool] = oracle.run(writing.run())
        return result
    finally:
        assert oracle.all_given_back()
