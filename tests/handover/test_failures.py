"""State after a failed hand-over: all ranks of both sides end with a typed error in time.

Nothing is left over, and the next hand-over succeeds.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.handover.handles import SendHandle
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, Full, KVStoreError, StaleHandle, Unreachable
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import assert_nothing_is_left, within
from tests.handover.scene import EVERY_WAY, SPEC, Executor, executor, gathered, layout_of, outcomes

BLOCKS, TOKENS = [1, 2], 32
QUICK: dict[str, Any] = {"min_layer_batch_bytes": Size(0)}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Executor, Executor]]:
    """TP 2 x PP 2 to TP 2 over TCP; each test leaves them usable."""
    settings = HandoverSettings(deadline_s=20, way="push", direct_min_bytes=Size(0), **QUICK)
    with Executor(layout_of(tp=2, pp=2), settings) as source, Executor(layout_of(tp=2), settings) as destination:
        source.fill(1)
        yield source, destination


def errors_of(handovers: list[Any]) -> list[type[KVStoreError] | None]:
    """With what each ends."""
    found: list[type[KVStoreError] | None] = []
    for handover in handovers:
        try:
            handover.wait()
        except KVStoreError as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


def check_next(source: Executor, destination: Executor, request_id: bytes) -> None:
    """A request goes well."""
    wanted = destination.receive(request_id, [8, 9], TOKENS, source)
    given = source.send(request_id, BLOCKS, TOKENS)
    for sending in given:
        sending.all_ready()
    assert errors_of([*given, *wanted]) == [None] * (len(given) + len(wanted))
    assert np.array_equal(gathered(source, BLOCKS, TOKENS), gathered(destination, [8, 9], TOKENS))
    assert set(outcomes((source, destination), request_id)) == {None}


@pytest.mark.parametrize("way", ["pull", "push"])
def test_engine_keeps_nothing_of_an_unreachable_rank(way: str) -> None:
    """Its pool above all, which stays in memory for as long as it is mapped: who takes its place has another one."""
    with executor(layout_of(), way) as staying:
        for number, stays_as in enumerate(("destination", "source")):
            request_id = f"r{number}".encode()
            with executor(layout_of(), way) as leaving:
                pair = (leaving, staying) if stays_as == "destination" else (staying, leaving)
                check_next(*pair, request_id)
                assert any(executor.ranks[0].engine_peers() for executor in pair)
            staying.until(lambda: not staying.ranks[0].engine_peers())


def test_cancel_before_the_other_side_begins_cancels_for_all(pair: tuple[Executor, Executor]) -> None:
    source, destination = pair
    with within(1):
        given = source.send(b"early 1", BLOCKS, TOKENS)
        given[3].cancel()
        assert errors_of(given) == [Cancelled] * 4
        assert errors_of(destination.receive(b"early 1", [3, 4], TOKENS, source)) == [Cancelled] * 2
        wanted = destination.receive(b"early 2", [3, 4], TOKENS, source)
        wanted[1].cancel()
        assert errors_of(wanted) == [Cancelled] * 2
        assert errors_of(source.send(b"early 2", BLOCKS, TOKENS)) == [Cancelled] * 4
    check_next(*pair, b"after early")


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_rank_that_cancels_in_the_middle_cancels_it_for_all(pair: tuple[Executor, Executor], who: str) -> None:
    source, destination = pair
    request_id = f"middle {who}".encode()
    wanted = destination.receive(request_id, [3, 4], TOKENS, source)
    given = source.send(request_id, BLOCKS, TOKENS)
    given[0].layer_ready(0)
    source.until(lambda: given[0].sent_bytes > 0)
    (given[2] if who == "sender" else wanted[1]).cancel()
    with within(1):
        assert errors_of([*given, *wanted]) == [Cancelled] * 6
    assert all(handover.is_fenced for handover in [*given, *wanted])
    assert {type(error) for error in outcomes(pair, request_id)} == {Cancelled}
    check_next(*pair, b"after " + request_id)


def test_receiver_without_a_sender_ends_at_its_deadline(pair: tuple[Executor, Executor]) -> None:
    with within(0.3):
        assert set(errors_of(pair[1].receive(b"no sender", [3, 4], TOKENS, pair[0], deadline_s=0.3))) == {DeadlineExceeded}
    assert set(errors_of(pair[0].send(b"no sender", BLOCKS, TOKENS))) == {DeadlineExceeded}


def test_a_sender_whom_nobody_asks_ends_at_its_deadline(pair: tuple[Executor, Executor]) -> None:
    with within(0.3):
        assert set(errors_of(pair[0].send(b"no receiver", BLOCKS, TOKENS, deadline_s=0.3))) == {DeadlineExceeded}
    assert set(errors_of(pair[1].receive(b"no receiver", [3, 4], TOKENS, pair[0]))) == {DeadlineExceeded}


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_the_first_deadline_ends_both_sides(pair: tuple[Executor, Executor], who: str) -> None:
    source, destination = pair
    request_id = f"slow prefill, {who}".encode()
    short = {"deadline_s": 0.4}
    with within(0.4):
        wanted = destination.receive(request_id, [3, 4], TOKENS, source, **(short if who == "receiver" else {}))
        given = source.send(request_id, BLOCKS, TOKENS, **(short if who == "sender" else {}))
        given[0].layer_ready(0)
        assert set(errors_of([*given, *wanted])) == {DeadlineExceeded}
    check_next(*pair, b"after " + request_id)


def test_a_rank_that_never_takes_part_is_told_of_by_rank_0(pair: tuple[Executor, Executor]) -> None:
    [first, *_] = pair[0].ranks
    sending = first.transceiver.send(b"alone", BLOCKS, tokens=TOKENS, deadline_s=0.2)
    assert errors_of([sending]) == [DeadlineExceeded]
    assert isinstance(first.outcome_of(b"alone"), DeadlineExceeded)


def test_description_of_an_earlier_run_is_stale_or_unreachable() -> None:
    with Executor(layout_of()) as source:
        old = source.descriptions
        control = source.counterpart(source).ranks[0].control
    with Executor(layout_of()) as destination:
        transceiver = destination.ranks[0].transceiver
        receiving = transceiver.receive(b"gone", BLOCKS, tokens=TOKENS, source=transceiver.connect(old))
        with within(1), pytest.raises(Unreachable, match="cannot connect to rank 0"):
            receiving.wait()
        with Executor(layout_of(), HandoverSettings(listen=str(control))) as again:
            receiving = transceiver.receive(b"other", BLOCKS, tokens=TOKENS, source=transceiver.connect(old))
            with within(1), pytest.raises(StaleHandle, match="describe and connect again"):
                receiving.wait()
            again.fill(1)
            check_next(again, destination, b"next")


def test_a_sender_that_names_its_receiver_gives_to_no_other() -> None:
    with Executor(layout_of()) as source, Executor(layout_of()) as named, Executor(layout_of()) as other:
        [sending] = source.send(b"r", BLOCKS, TOKENS, to=source.counterpart(named))
        assert errors_of([*other.receive(b"r", BLOCKS, TOKENS, source), sending]) == [StaleHandle] * 2


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_side_that_closes_ends_the_other_at_once(who: str) -> None:
    with executor(layout_of(), "push", **QUICK) as source, executor(layout_of(), "push", **QUICK) as destination:
        [receiving] = destination.receive(b"r", BLOCKS, TOKENS, source)
        [sending] = source.send(b"r", BLOCKS, TOKENS)
        sending.layer_ready(0)
        source.until(lambda: sending.sent_bytes > 0)
        with within(1):
            (source if who == "sender" else destination).ranks[0].transceiver.close()
            assert None not in errors_of([sending, receiving])


def test_no_staging_left_is_told_to_both_sides() -> None:
    small = {"staging_bytes": Size(64 << 10), "staging_part_bytes": Size(1 << 20), "direct_min_bytes": Size(1 << 30), "staging_slots": 64}
    with executor(layout_of(), "push-gathered") as source, executor(layout_of(), "push", **small) as destination:
        wanted = destination.receive(b"r", [1, 2, 3, 4, 5], 80, source)
        assert errors_of([*wanted]) == [Full]
    with executor(layout_of(), "push", **small) as source, executor(layout_of(), "push-gathered", staging_slots=64) as destination:
        wanted = destination.receive(b"r", [1, 2, 3, 4, 5], 80, source)
        assert errors_of([*source.send(b"r", [1, 2, 3, 4, 5], 80), *wanted]) == [Full, Full]


def test_error_while_beginning_ends_the_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory cannot be registered."""

    def no_window(*_what: object, **_how: object) -> None:
        raise OSError("no more memory can be registered")

    with executor(layout_of(), "push-gathered") as source, executor(layout_of(), "push-gathered") as destination:
        [rank] = destination.ranks
        with monkeypatch.context() as without:
            without.setattr("kvstore.handover.receiving.part_receiver.LayerWindow", no_window)
            assert errors_of(destination.receive(b"r", BLOCKS, TOKENS, source)) == [KVStoreError]
            assert rank.transceiver.staging_bytes == 0
        check_next(source, destination, b"next")
        assert rank.outcome_of(b"r") is not None, "and it was told once"


def has_sent(sending: SendHandle, size_bytes: int) -> bool:
    return sending.sent_bytes >= size_bytes


@EVERY_WAY
def test_blocks_belong_to_the_receiver_once_it_is_over(way: str) -> None:
    """Requests are cancelled after more and more of them has come, and the blocks written to at once by their owner: nothing else ever
    lands there."""
    spec_blocks = list(range(16))
    tokens = 256
    with executor(layout_of(), way, **QUICK) as source, executor(layout_of(tp=2), way, **QUICK) as destination:
        source.fill(1)
        total_bytes = len(spec_blocks) * SPEC.block_bytes
        for attempt in range(6):
            request_id = bytes([attempt])
            wanted = destination.receive(request_id, spec_blocks, tokens, source)
            [sending] = source.send(request_id, spec_blocks, tokens)
            sending.all_ready()
            source.until(partial(has_sent, sending, total_bytes * attempt // 6))
            for receiving in wanted:
                receiving.cancel()
            errors_of(wanted)
            for rank in destination.ranks:
                for memory in rank.memory:
                    memory[:] = 7
            errors_of([sending])
            assert all(bool((memory == 7).all()) for rank in destination.ranks for memory in rank.memory)
        check_next(source, destination, b"next")


@EVERY_WAY
def test_failures_leave_neither_threads_nor_descriptors(way: str) -> None:
    def fail() -> None:
        with executor(layout_of(), way, **QUICK) as source, executor(layout_of(), way, **QUICK) as destination:
            wanted = destination.receive(b"r", BLOCKS, TOKENS, source)
            given = source.send(b"r", BLOCKS, TOKENS)
            given[0].layer_ready(0)
            source.until(lambda: given[0].sent_bytes > 0)
            wanted[0].cancel()
            assert errors_of([*given, *wanted]) == [Cancelled, Cancelled]
            source.until(lambda: taken_bytes(source) == taken_bytes(destination) == 0)

    assert_nothing_is_left(fail)


def taken_bytes(side: Executor) -> int:
    return sum(rank.transceiver.staging_bytes for rank in side.ranks)
