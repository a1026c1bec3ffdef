"""Tests of group_commit.py: groups, retries and rejections. The writes are the test's own, so that it can delay them."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.master.catalogs import group_commit
from kvstore.master.catalogs.group_commit import MAX_GROUP_BYTES, MAX_GROUP_OPS, MAX_VALUE_BYTES, Backoff, GroupCommit
from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change, Op
from kvstore.protocol.errors import CatalogUnavailable, Closed, InvalidArgument, StaleEpoch
from kvstore.testing.transfer.awaited import eventually
from tests.master.catalogs.conformance import Outcomes

DEADLINE_S = 60.0


class Place:
    """A place to write to, which can be held, and made to fail a number of times."""

    def __init__(self) -> None:
        self.groups: list[list[Change]] = []
        self.errors: list[Exception] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.on_write: Callable[[], None] = lambda: None
        self.owned = "first"
        self.stale: list[StaleEpoch] = []

    def write(self, changes: Sequence[Change], owned: str) -> None:
        assert owned == self.owned
        self.on_write()
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        if self.errors:
            raise self.errors.pop(0)
        self.groups.append(list(changes))

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_S)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def make(place: Place) -> Iterator[Callable[..., GroupCommit[str]]]:
    made: list[GroupCommit[str]] = []

    def make(*, first_s: float = 0.001, interrupt: Callable[[], None] = place.gate.set) -> GroupCommit[str]:
        backoff = Backoff(first_s=first_s, longest_s=first_s)
        made.append(GroupCommit(place.write, backoff=backoff, interrupt=interrupt, on_stale=place.stale.append))
        made[-1].admit(place.owned)
        return made[-1]

    yield make
    for committer in made:
        committer.close()


def test_queue_becomes_one_group_in_order(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(), Outcomes()
    committer.start()
    place.gate.clear()
    committer.submit([Op(b"a", b"1")], outcomes.done(0))
    place.wait_entered()
    committer.submit([Op(b"a", b"2"), Op(b"b", b"1")], outcomes.done(1))
    committer.submit([Op(b"b", None)], outcomes.done(2))
    assert outcomes.empty
    place.gate.set()
    assert [outcomes.next() for _commit in range(3)] == [(0, None), (1, None), (2, None)]
    assert place.groups == [[Op(b"a", b"1")], [Op(b"a", b"2"), Op(b"b", b"1"), Op(b"b", None)]]


@pytest.mark.parametrize(
    "batch",
    [
        [Op(b"%d" % number, b"") for number in range(MAX_GROUP_OPS)],
        [Op(b"%d" % number, b"v" * MAX_VALUE_BYTES) for number in range(MAX_GROUP_BYTES // MAX_VALUE_BYTES)],
        [BlockDeletes("red", [b"%d" % number for number in range(MAX_GROUP_OPS)])],
    ],
    ids=["operations", "bytes", "blocks"],
)
def test_a_group_takes_no_further_batch_past_its_limits(place: Place, make: Callable[..., GroupCommit[str]], batch: list[Change]) -> None:
    committer, outcomes = make(), Outcomes()
    committer.submit(batch, outcomes.done(0))
    committer.submit([Op(b"next", b"")], outcomes.done(1))
    committer.start()
    assert [outcomes.next(), outcomes.next()] == [(0, None), (1, None)]
    assert place.groups == [batch, [Op(b"next", b"")]]


def test_failed_write_is_retried_and_reported(
    place: Place, make: Callable[..., GroupCommit[str]], caplog: pytest.LogCaptureFixture
) -> None:
    committer, outcomes = make(), Outcomes()
    place.errors = [CatalogUnavailable("no disk"), RuntimeError("odd"), CatalogUnavailable("no disk")]
    healths: list[str] = []
    place.on_write = lambda: healths.append(committer.health)
    committer.start()
    with caplog.at_level(logging.WARNING, logger="kvstore.master"):
        committer.submit([Op(b"a", b"1")], outcomes.done())
        assert outcomes.next() == (0, None)
    waiting = "(0 commits wait behind it)"
    assert healths == ["ok", f"no disk {waiting}", f"odd {waiting}", f"no disk {waiting}"]
    assert committer.health == "ok"
    assert place.groups == [[Op(b"a", b"1")]]
    assert [record.message for record in caplog.records] == ["catalog: no disk", "catalog: takes writes again"]


def test_fenced_owner_fails_all_commits_until_admitted(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(), Outcomes()
    place.errors = [StaleEpoch("b owns it")]
    committer.start()
    for number in range(3):
        committer.submit([Op(b"a", b"1")], outcomes.done(number))
        told, error = outcomes.next()
        assert (told, type(error)) == (number, StaleEpoch)
    assert place.groups == []
    assert [str(error) for error in place.stale] == ["b owns it"]
    place.owned = "second"
    committer.admit("second")
    committer.submit([Op(b"a", b"1")], outcomes.done(3))
    assert outcomes.next() == (3, None)


def test_background_steps_run_when_idle_and_after_groups(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    outcomes, told = Outcomes(), list[str]()
    steps: list[Exception | bool] = [True, False, RuntimeError("odd"), True, StaleEpoch("b owns it")]
    done = threading.Semaphore(0)

    def step(owned: str) -> bool:
        told.append(owned)
        result = steps.pop(0) if steps else False
        done.release()
        if isinstance(result, Exception):
            raise result
        return result

    committer = GroupCommit(place.write, backoff=Backoff(first_s=0.001, longest_s=0.001), on_stale=place.stale.append, background=step)
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done(0))
    assert isinstance(outcomes.next()[1], StaleEpoch)
    assert told == [], "there is nothing to be done for a catalog that another owns"
    committer.admit("first")
    for _step in range(2):
        assert done.acquire(timeout=DEADLINE_S)
    for number in (1, 2):
        committer.submit([Op(b"a", b"1")], outcomes.done(number))
        assert outcomes.next() == (number, None)
        assert done.acquire(timeout=DEADLINE_S)
    assert done.acquire(timeout=DEADLINE_S)
    eventually(lambda: bool(place.stale), "that it is told of the fence")
    assert told == ["first"] * 5
    assert "not merged for now: odd" in caplog.text
    committer.close()


def test_health_tells_of_a_commit_that_takes_long(
    place: Place, make: Callable[..., GroupCommit[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "SLOW_COMMIT_S", 0.0)
    committer, outcomes = make(), Outcomes()
    place.gate.clear()
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done())
    place.wait_entered()
    assert committer.health.startswith("a commit has been under way for ")
    place.gate.set()
    assert outcomes.next() == (0, None)
    monkeypatch.setattr(group_commit, "SLOW_COMMIT_S", 60.0)
    assert committer.health == "ok"


def test_commits_outside_of_an_ownership_fail(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(), Outcomes()
    place.gate.clear()
    place.errors = [CatalogUnavailable("no disk")]
    committer.start()
    committer.submit([Op(b"a", b"under way")], outcomes.done(0))
    place.wait_entered()
    committer.submit([Op(b"a", b"waits")], outcomes.done(1))
    committer.refuse(CatalogUnavailable("the lease is over"))
    committer.submit([Op(b"a", b"later")], outcomes.done(2))
    place.owned = "second"
    committer.admit("second")
    committer.submit([Op(b"a", b"owned again")], outcomes.done(3))
    place.gate.set()
    told = [outcomes.next() for _commit in range(4)]
    assert [(number, type(error)) for number, error in told] == [(0, StaleEpoch), (1, StaleEpoch), (2, StaleEpoch), (3, type(None))]
    assert "the lease is over" in str(told[1][1])
    assert place.groups == [[Op(b"a", b"owned again")]]


def test_a_write_that_finds_out_late_deposes_no_later_ownership(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(), Outcomes()
    place.gate.clear()
    place.errors = [StaleEpoch("b owns it")]
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done(0))
    place.wait_entered()
    committer.refuse(StaleEpoch("the lease is over"))
    place.owned = "second"
    committer.admit("second")
    place.gate.set()
    assert isinstance(outcomes.next()[1], StaleEpoch)
    committer.submit([Op(b"a", b"2")], outcomes.done(1))
    assert outcomes.next() == (1, None)
    assert place.stale == []


def put(**columns: Any) -> BlockPuts:
    good = BlockPuts("red", [b"k"], [1], [2], [3], ["ns"], [b"p"], [(1,)])
    return good._replace(**columns)


@pytest.mark.parametrize(
    "change",
    [
        Op(b"", b"x"),
        Op(b"k" * 401, None),
        Op(b"k", b"v" * (MAX_VALUE_BYTES + 1)),
        put(keys=[b""]),
        put(keys=[b"k" * 256]),
        put(tenant="t" * 129),
        put(sizes=[1, 2]),
        put(parents=[b"p" * 256]),
        put(namespaces=["n" * 256]),
        put(sizes=[-1]),
        put(generations=[1 << 64]),
        put(holders=[(1 << 32,)]),
        put(holders=[tuple(range(65_536))]),
        BlockDeletes("t" * 129, [b"k"]),
        BlockDeletes("red", [b"k", b""]),
    ],
)
def test_a_batch_with_a_change_over_the_limits_is_refused_whole(
    place: Place, make: Callable[..., GroupCommit[str]], change: Change
) -> None:
    committer, outcomes = make(), Outcomes()
    with pytest.raises(InvalidArgument):
        committer.submit([Op(b"a", b"1"), change], outcomes.done())
    committer.close()
    assert outcomes.empty


def test_a_callback_that_raises_does_not_stop_the_others(
    place: Place, make: Callable[..., GroupCommit[str]], caplog: pytest.LogCaptureFixture
) -> None:
    committer, outcomes = make(), Outcomes()

    def broken(_error: object) -> None:
        raise ValueError("callback")

    committer.submit([Op(b"a", b"1")], broken)
    committer.submit([Op(b"b", b"1")], outcomes.done())
    committer.start()
    assert outcomes.next() == (0, None)
    assert "a commit's callback raised" in caplog.text


def test_close_during_a_back_off_tries_once_more(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(first_s=3_600), Outcomes()
    place.errors = [CatalogUnavailable("no disk")]
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done())
    place.wait_entered()
    committer.close()
    assert outcomes.next()[0] == 0
    assert len(place.groups) <= 1


def test_close_fails_what_its_last_try_does_not_make_durable(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(first_s=3_600), Outcomes()
    place.errors = [CatalogUnavailable("no disk")] * 2
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done(0))
    place.wait_entered()
    committer.submit([Op(b"b", b"1")], outcomes.done(1))
    committer.close()
    told = [outcomes.next(), outcomes.next()]
    assert [number for number, _error in told] == [0, 1]
    assert all(isinstance(error, Closed) and "no disk" in str(error) for _number, error in told)
    assert place.groups == []


def test_close_interrupts_a_write_that_hangs(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    def interrupt() -> None:
        place.errors.append(CatalogUnavailable("interrupted"))
        place.gate.set()

    committer, outcomes = make(interrupt=interrupt), Outcomes()
    place.gate.clear()
    committer.start()
    committer.submit([Op(b"a", b"1")], outcomes.done())
    place.wait_entered()
    committer.close()
    assert isinstance(outcomes.next()[1], Closed)


def test_unstarted_committer_fails_the_queue_with_closed(place: Place, make: Callable[..., GroupCommit[str]]) -> None:
    committer, outcomes = make(), Outcomes()
    committer.submit([Op(b"a", b"1")], outcomes.done(0))
    committer.close()
    committer.submit([Op(b"a", b"1")], outcomes.done(1))
    assert [type(outcomes.next()[1]), type(outcomes.next()[1])] == [Closed, Closed]
    assert place.groups == []
