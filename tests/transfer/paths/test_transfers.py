"""Transfer, as its holder sees it; that it ends is the carrier's (test_slice_dispatcher.py)."""

from collections.abc import Callable

import pytest

from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually, in_background, is_quiet
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths import transfers
from kvstore.transfer.paths.transfers import Priority, Transfer


class Engine:
    """Engine as a transfer sees it: `abort`, a no-op for a transfer that is over, and `assist`. With `ends`, `abort` also completes it."""

    def __init__(self, *, ends: bool = True) -> None:
        self.ends = ends
        self.helped = 0
        self.on_help: Callable[[Transfer], None] = lambda transfer: None

    def transfer(
        self, held: list[Region] | None = None, *, deadline_s: float = PATIENCE_S, on_done: Callable[[Transfer], None] | None = None
    ) -> Transfer:
        return Transfer(Deadline(deadline_s), Priority.FOREGROUND, held or [], self.abort, self.assist, on_done)

    def abort(self, transfer: Transfer, error: KVStoreError) -> None:
        if transfer.is_over:
            return
        transfer.error = error
        if self.ends:
            transfer.complete()

    def assist(self, transfer: Transfer) -> None:
        self.helped += 1
        self.on_help(transfer)


def test_whoever_waits_helps_and_returns_when_it_is_over() -> None:
    engine = Engine()
    transfer = engine.transfer()
    waiting = [in_background(transfer.wait) for _ in range(3)]
    assert all(is_quiet(thread) for thread in waiting)
    transfer.complete()
    for thread in waiting:
        thread.result(PATIENCE_S)
    assert engine.helped == 3
    transfer.wait()
    assert engine.helped == 3, "it is over"


def test_an_end_between_the_look_and_the_wait_is_seen() -> None:
    """The transfer ends, without an event to set, right before the waiter makes one."""
    engine = Engine()
    transfer = engine.transfer()
    lock = transfer._lock

    class LateLock:
        def __enter__(self) -> None:
            transfer._lock = lock
            transfer.complete()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    transfer._lock = LateLock()  # type: ignore[assignment]
    transfer.wait()
    assert transfer.is_over


@pytest.mark.promise("interrupts-safe")
def test_memory_is_held_while_a_slice_does_not_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transfers, "ABORT_TIMEOUT_S", 0.01)
    region = Region(memoryview(bytearray(4)))
    region.hold()
    transfer = Engine(ends=False).transfer([region], deadline_s=0)
    waiting = in_background(transfer.wait)
    eventually(lambda: "its agent is faulty" in caplog.text, "it is logged")
    assert is_quiet(waiting)
    assert region.users == 1
    transfer.complete()
    with pytest.raises(DeadlineExceeded):
        waiting.result(PATIENCE_S)
    assert region.users == 0


def test_exceptions_in_wait_are_raised_when_it_is_over() -> None:
    engine = Engine(ends=False)

    def fail(transfer: Transfer) -> None:
        raise ZeroDivisionError

    engine.on_help = fail
    transfer = engine.transfer()
    waiting = in_background(transfer.wait)
    eventually(lambda: isinstance(transfer.error, Cancelled), "it is cancelled")
    assert is_quiet(waiting)
    transfer.complete()
    with pytest.raises(ZeroDivisionError):
        waiting.result(PATIENCE_S)


def test_its_error_keeps_nothing_of_its_callers() -> None:
    """Neither the frames of those who wait, nor the exception because of which it is abandoned."""
    transfer = Engine().transfer()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        transfer.abandon()
    for wait in (transfer.wait, transfer.check):
        with pytest.raises(Cancelled):
            wait()
    assert transfer.error is not None
    assert (transfer.error.__traceback__, transfer.error.__context__) == (None, None)


def test_it_lets_go_of_its_regions_before_it_tells() -> None:
    regions = [Region(memoryview(bytearray(4))) for _ in range(2)]
    for region in regions:
        region.hold()
    seen: list[tuple[bool, int]] = []
    transfer = Engine().transfer(regions, on_done=lambda transfer: seen.append((transfer.is_over, sum(region.users for region in regions))))
    transfer.complete()
    assert seen == [(True, 0)]


def test_a_failing_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(transfer: Transfer) -> None:
        raise ValueError("a mistake")

    transfer = Engine().transfer(on_done=fail)
    waiting = in_background(transfer.wait)
    transfer.complete()
    waiting.result(PATIENCE_S)
    assert "a mistake" in caplog.text
