"""Gets from a scripted cluster."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvstore.client.core.buffers import as_destination
from kvstore.client.reads.batch_read import BatchGet
from kvstore.client.reads.mapped_values import CopyOut
from kvstore.client.reads.sinks import FreshBytes, IntoBuffers, Sink
from tests.client.oracle import Oracle

R = TypeVar("R")


def get(oracle: Oracle, *keys: bytes, now_ns: Callable[[], int] = lambda: 1000) -> list[bytes | None]:
    return read(oracle, keys, FreshBytes(len(keys)), now_ns)


def get_into(oracle: Oracle, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[int | None]:
    return read(oracle, keys, IntoBuffers([as_destination(buffer) for buffer in buffers]), lambda: 1000)


def read(oracle: Oracle, keys: Sequence[bytes], sink: Sink[R], now_ns: Callable[[], int]) -> list[R | None]:
    """Checks that no connection stays lent, however it ends."""
    reading = BatchGet(oracle.resources, keys, sink, CopyOut(oracle.resources, now_ns), oracle.deadline(), now_ns)
    try:
        result: list[R | None] = oracle.run(reading.run())
        return result
    finally:
        assert oracle.all_given_back()
