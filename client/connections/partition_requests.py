"""Requests about keys, split by partition: each part goes to its owner concurrently, replies are merged in key order.
Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.protocol.partitions import split
from kvstore.rpc.deadline import Deadline

T = TypeVar("T")


def split_by_partition(daemons: ClusterConnections, keys: Sequence[bytes], deadline: Deadline) -> Operation[dict[int, Sequence[int]]]:
    """Key indexes by partition. Raises as `call_master` while the number of partitions is unknown."""
    count = yield from daemons.partitions(deadline)
    if count == 1:
        return {0: range(len(keys))}
    found: dict[int, Sequence[int]] = {}
    found.update(split(keys, count))
    return found


def by_partition(
    daemons: ClusterConnections, keys: Sequence[bytes], deadline: Deadline, ask: Callable[[int, Sequence[bytes]], Operation[list[T]]]
) -> Operation[list[T]]:
    """Results of `ask(partition, keys)`, merged in key order. The first error is raised. No keys: no request."""
    if not keys:
        return []
    found = yield from split_by_partition(daemons, keys, deadline)
    if len(found) == 1:
        [partition] = found
        return (yield from ask(partition, keys))
    answers: list[list[T]] = yield GatherEffect([ask(partition, [keys[i] for i in at]) for partition, at in found.items()])
    merged = {i: one for at, answer in zip(found.values(), answers, strict=True) for i, one in zip(at, answer, strict=True)}
    return [merged[i] for i in range(len(keys))]


def for_all_partitions(daemons: ClusterConnections, deadline: Deadline, ask: Callable[[int], Operation[T]]) -> Operation[list[T]]:
    """Result of `ask` for each partition."""
    count = yield from daemons.partitions(deadline)
    if count == 1:
        return [(yield from ask(0))]
    answers: list[T] = yield GatherEffect([ask(partition) for partition in range(count)])
    return answers
