"""Promises of roll_call.py: a request is over for an executor when it is for all ranks of its group, or has failed on one."""

from kvstore.handover.ranks.completion_tracker import GRACE_NS, CompletionTracker, Outcome
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError, Unreachable

LATE = 100


def over(roll: CompletionTracker, rank: int, error: KVStoreError | None = None, *, request_id: bytes = b"r", dp: int = 0) -> Outcome | None:
    return roll.over(request_id, rank, error, dp=dp, deadline_ns=LATE)


def test_it_is_over_once_every_rank_says_so() -> None:
    roll = CompletionTracker(Parallel(tp=3))
    roll.begun(b"r", 0, deadline_ns=LATE)
    assert [over(roll, 2), over(roll, 2), over(roll, 0)] == [None, None, None]
    assert len(roll) == 1
    assert over(roll, 1) == (b"r", None)
    assert len(roll) == 0


def test_the_first_failure_decides_and_names_the_rank() -> None:
    roll = CompletionTracker(Parallel(tp=2))
    over(roll, 0)
    outcome = over(roll, 1, Cancelled("enough"))
    assert outcome is not None
    assert isinstance(outcome.error, Cancelled)
    assert str(outcome.error) == "rank 1: enough"
    assert over(roll, 0, Unreachable("later")) is None
    roll.begun(b"r", 0, deadline_ns=LATE)
    assert len(roll) == 0


def test_what_a_lost_rank_has_not_finished_has_failed() -> None:
    roll = CompletionTracker(Parallel(tp=4, dp=2))
    over(roll, 2, request_id=b"of the other group", dp=1)
    over(roll, 0, request_id=b"not yet")
    over(roll, 1, request_id=b"finished there")
    [(request_id, error)] = roll.lost(1)
    assert request_id == b"not yet"
    assert isinstance(error, Unreachable)
    assert len(roll) == 2


def test_what_a_rank_never_finishes_fails_after_the_latest_deadline() -> None:
    roll = CompletionTracker(Parallel(tp=2))
    roll.begun(b"r", 0, deadline_ns=1)
    over(roll, 1)
    assert roll.expire(LATE + GRACE_NS - 1) == []
    [(_, error)] = roll.expire(LATE + GRACE_NS)
    assert isinstance(error, DeadlineExceeded)
    assert "[0]" in str(error)


def test_failures_are_remembered_for_those_who_report_late_and_no_longer() -> None:
    roll = CompletionTracker(Parallel(tp=2))
    over(roll, 1, Cancelled("enough"))
    roll.expire(LATE + GRACE_NS - 1)
    assert over(roll, 0) is None
    assert len(roll) == 0
    roll.expire(LATE + GRACE_NS)
    assert over(roll, 0) is None
    assert len(roll) == 1
