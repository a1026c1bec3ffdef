"""Promises of calls.py, on a real cluster."""

import logging
from typing import Any

import pytest

from kvstore.client.jobs.client_calls import Calls, JobOutcome, sizes_of
from kvstore.client.jobs.job import Job, JobKind
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unavailable
from tests.client.jobs.clock import Clock
from tests.client.jobs.faulty import FaultyClient, raises

NAMES = iter(range(1 << 30))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls(client: FaultyClient, clock: Clock) -> Calls:
    return Calls(client, batch_bytes=100, clock_ns=clock)


def fresh_keys(count: int) -> list[bytes]:
    return [b"calls %d" % next(NAMES) for _ in range(count)]


def job(clock: Clock, kind: JobKind, keys: list[bytes], values: Any = ()) -> Job:
    made = Job(kind, None, keys, deadline_ns=clock() + 10_000_000_000, budget_s=10.0)
    made.values, made.sizes = values, sizes_of(values) if len(values) else ()
    return made


def stored(client: FaultyClient, count: int, size: int = 40) -> tuple[list[bytes], list[bytes]]:
    keys = fresh_keys(count)
    values = [key.ljust(size, b"-") for key in keys]
    client.put_batch(keys, values, deadline_s=30)
    client.calls.clear()
    return keys, values


def test_values_are_stored_and_loaded_in_parts_of_a_batch(client: FaultyClient, calls: Calls, clock: Clock) -> None:
    keys = fresh_keys(5)
    values = [bytes([i]) * size for i, size in enumerate([60, 40, 1, 500, 10])]
    store = job(clock, JobKind.STORE, keys, values)
    store.parents, store.namespace, store.ack = [None, *keys[:4]], "jobs", "cluster"
    assert calls.carry_out(store) is JobOutcome.ANSWERED
    assert store.results == [True] * 5
    assert client.calls == [("put", keys[:2]), ("put", keys[2:3]), ("put", keys[3:4]), ("put", keys[4:])]
    again = job(clock, JobKind.STORE, keys, values)
    calls.carry_out(again)
    assert again.results == [False] * 5
    buffers = [bytearray(len(value)) for value in values]
    load = job(clock, JobKind.LOAD, [*keys, *fresh_keys(1)], [*buffers, bytearray(10)])
    assert calls.carry_out(load) is JobOutcome.ANSWERED
    assert load.results == [60, 40, 1, 500, 10, None]
    assert buffers == values


def test_when_the_store_cannot_be_reached_the_rest_is_not_tried(client: FaultyClient, calls: Calls, clock: Clock) -> None:
    keys, _ = stored(client, 6)
    store_unavailable = Unavailable("unreachable")
    client.faults += [lambda deadline_s: None, raises(store_unavailable)]
    load = job(clock, JobKind.LOAD, keys, [bytearray(40) for _ in keys])
    assert calls.carry_out(load) is JobOutcome.UNREACHABLE
    assert load.results == [40, 40, store_unavailable, store_unavailable, store_unavailable, store_unavailable]
    assert len(client.calls) == 2


def test_what_is_nobodys_error_is_logged_and_typed(
    client: FaultyClient, calls: Calls, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    client.faults.append(raises(ZeroDivisionError("a mistake")))
    lookup = job(clock, JobKind.LOOKUP, fresh_keys(1))
    with caplog.at_level(logging.ERROR, "kvstore.client"):
        assert calls.carry_out(lookup) is JobOutcome.ANSWERED
    assert type(lookup.error) is KVStoreError
    assert "a mistake" in caplog.text


def test_a_call_has_what_is_left_of_the_deadline(client: FaultyClient, calls: Calls, clock: Clock) -> None:
    given: list[float] = []
    client.faults.append(given.append)
    load = job(clock, JobKind.LOOKUP, fresh_keys(1))
    clock.advance(4)
    calls.carry_out(load)
    assert given == [6.0]


@pytest.mark.parametrize(("waited_s", "outcome"), [(4, JobOutcome.UNREACHABLE), (6, JobOutcome.UNKNOWN)])
def test_deadline_spent_in_the_queue_is_no_evidence(
    client: FaultyClient, calls: Calls, clock: Clock, waited_s: float, outcome: JobOutcome
) -> None:
    client.faults.append(raises(DeadlineExceeded("late")))
    lookup = job(clock, JobKind.LOOKUP, fresh_keys(1))
    clock.advance(waited_s)
    assert calls.carry_out(lookup) is outcome
    assert isinstance(lookup.error, DeadlineExceeded)


@pytest.mark.parametrize(("kind", "name"), [(JobKind.LOOKUP, "exists"), (JobKind.PREFIX, "match"), (JobKind.LOAD, "view")])
def test_a_probe_asks_again_without_the_callers_memory(client: FaultyClient, calls: Calls, clock: Clock, kind: JobKind, name: str) -> None:
    keys, _ = stored(client, 6)
    buffers = [bytearray(40) for _ in keys]
    failing = job(clock, kind, keys, buffers if kind is JobKind.LOAD else ())
    client.faults += [lambda deadline_s: None] * (kind is JobKind.LOAD) + [raises(Unavailable("unreachable"))]
    assert calls.carry_out(failing) is JobOutcome.UNREACHABLE
    written = [bytes(buffer) for buffer in buffers]
    calls.probe(failing)(30)
    assert client.calls[-1] == (name, keys[2:3] if kind is JobKind.LOAD else keys)
    assert [bytes(buffer) for buffer in buffers] == written
