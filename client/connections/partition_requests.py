"""Questions about keys, each asked of the master that owns the key's partition: all at once, and the answers put together in the order of
the keys. With one partition the question goes out as it is. Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.protocol.partitions import split
from kvstore.rpc.deadline import Deadline

T = TypeVar("T")


def places(daemons: ClusterConnections, keys: Sequence[bytes], deadline: Deadline) -> Operation[dict[int, Sequence[int]]]:
    """The keys' indices by partition. Raises as Daemons.ask_master, where it is not known yet how many there are."""
    count = yield from daemons.partitions(deadline)
    if count == 1:
        return {0: range(len(keys))}
    found: dict[int, Sequence[int]] = {}
    found.update(split(keys, count))
    return found


def by_partition(
    daemons: ClusterConnections, keys: Sequence[bytes], deadline: Deadline, ask: Callable[[int, Sequence[bytes]], Operation[list[T]]]
) -> Operation[list[T]]:
    """What `ask` answers for each key: it is told a partition and keys of it. The first error is raised. Nobody is asked about no keys."""
    if not keys:
        return []
    found = yield from places(daemons, keys, deadline)
    if len(found) == 1:
        [partition] = found
        return (yield from ask(partition, keys))
    answers: list[list[T]] = yield GatherEffect([ask(partition, [keys[i] for i in at]) for partition, at in found.items()])
    merged = {i: one for at, answer in zip(found.values(), answers, strict=True) for i, one in zip(at, answer, strict=True)}
    return [merged[i] for i in range(len(keys))]


def of_all(daemons: ClusterConnections, deadline: Deadline, ask: Callable[[int], Operation[T]]) -> Operation[list[T]]:
    """What `ask` answers for each partition."""
    count = yield from daemons.partitions(deadline)
    if count == 1:
        return [(yield from ask(0))]
    answers: list[T] = yield GatherEffect([ask(partition) for partition in range(count)])
    return answers
