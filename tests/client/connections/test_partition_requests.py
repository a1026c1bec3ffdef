"""Promises of partition_requests.py: each partition is asked about its own keys, all at once, and the answers are in the keys' order."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.partition_requests import by_partition, split_by_partition
from kvstore.client.core.effects import Effect, GatherEffect, Operation, drive
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.partitions import partition_of
from kvstore.rpc.deadline import Deadline

KEYS = [b"key-%d" % number for number in range(20)]


class Counted:
    """As far as these functions see Daemons."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[tuple[int, list[bytes]]] = []

    def partitions(self, deadline: Deadline) -> Operation[int]:
        return self.count
        yield

    def ask(self, partition: int, keys: Sequence[bytes]) -> Operation[list[bytes]]:
        self.asked.append((partition, list(keys)))
        return [key.upper() for key in keys]
        yield

    def run(self, operation: Operation[Any]) -> Any:
        def do(effect: Effect) -> Any:
            assert isinstance(effect, GatherEffect)
            return [self.run(one) for one in effect.operations]

        return drive(operation, do)

    @property
    def daemons(self) -> ClusterConnections:
        return cast(ClusterConnections, self)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_answers_come_in_the_order_of_the_keys(count: int) -> None:
    counted = Counted(count)
    found = counted.run(by_partition(counted.daemons, KEYS, Deadline(60), counted.ask))
    assert found == [key.upper() for key in KEYS]
    assert dict(counted.asked) == {
        partition: [key for key in KEYS if partition_of(key, count) == partition]
        for partition in {partition_of(key, count) for key in KEYS}
    }


def test_the_first_error_is_raised() -> None:
    def ask(partition: int, keys: Sequence[bytes]) -> Operation[list[bytes]]:
        raise Unavailable(f"partition {partition}")
        yield

    counted = Counted(3)
    with pytest.raises(Unavailable):
        counted.run(by_partition(counted.daemons, KEYS, Deadline(60), ask))
    assert counted.run(split_by_partition(counted.daemons, KEYS[:1], Deadline(60))) == {partition_of(KEYS[0], 3): [0]}
