"""Batches with a result per key: an error of one key, value or buffer is its result, and the others proceed. Sans-I/O:
see effects.py."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.buffers import Sources, as_parts
from kvstore.client.core.effects import Operation
from kvstore.client.memory import Parts
from kvstore.client.writes.batch_put import BatchPut
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.frames import check_key
from kvstore.rpc.deadline import Deadline

T = TypeVar("T")


def check_each(keys: Sequence[bytes], values: Sequence[Any], convert: Callable[[Any], T]) -> list[T | InvalidArgument]:
    """Each converted value, or the error of the value or its key."""
    found: list[T | InvalidArgument] = []
    for key, value in zip(keys, values, strict=True):
        try:
            check_key(key)
            found.append(convert(value))
        except InvalidArgument as error:
            found.append(error)
    return found


def put_each(
    resources: ClientResources,
    keys: Sequence[bytes],
    values: Sequence[Any],
    *,
    namespace: str,
    parents: Sequence[bytes | None] | None,
    acks_at_node: bool,
    deadline: Deadline,
) -> Operation[list[bool | KVStoreError]]:
    """Per key True if stored by this call, False if already there, else the error."""
    checked = check_each(keys, values, as_parts)
    results: list[bool | KVStoreError] = [False if not isinstance(parts, InvalidArgument) else parts for parts in checked]
    sound: dict[int, Parts] = {i: parts for i, parts in enumerate(checked) if not isinstance(parts, InvalidArgument)}
    batches = deque([list(sound)] if sound else [])
    while batches:
        batch = batches.popleft()
        writing = BatchPut(
            resources,
            [keys[i] for i in batch],
            Sources([sound[i] for i in batch]),
            namespace=namespace,
            parents=None if parents is None else [parents[i] for i in batch],
            acks_at_node=acks_at_node,
            deadline=deadline,
        )
        found: Sequence[bool | KVStoreError]
        try:
            found = yield from writing.run()
        except KVStoreError as error:
            found = writing.results_after(error)
            if (
                isinstance(error, InvalidArgument) and len(batch) > 1
            ):  # a value too large for every tier of a node: retry one by one to find it
                batches.extend([i] for i, result in zip(batch, found, strict=True) if result is error)
        for i, result in zip(batch, found, strict=True):
            results[i] = result
    return results
