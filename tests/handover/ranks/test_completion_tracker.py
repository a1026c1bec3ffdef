"""Promises of completion_tracker.py: a request is over for an executor when it is for all ranks of its group, or has failed on one."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.handover.description import RankInfo
from kvstore.handover.handles import SendHandle
from kvstore.handover.ranks import completion_tracker as module
from kvstore.handover.ranks.completion_tracker import GRACE_NS, CompletionCoordinator, CompletionTracker, RequestOutcome
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError, ProtocolError, Unreachable
from kvstore.protocol.handover_messages import RankReport, RequestEnded
from kvstore.protocol.message import Message
from kvstore.rpc.address import Address
from kvstore.rpc.reactor import Reactor
from tests.handover.scene import layout_of

LATE = 100
DEADLINE_NS = 1_000_000_000


def over(
    roll: CompletionTracker, rank: int, error: KVStoreError | None = None, *, request_id: bytes = b"r", dp: int = 0
) -> RequestOutcome | None:
    return roll.over(request_id, rank, error, dp=dp, deadline_ns=LATE)


def test_unfinished_rank_fails_the_request_after_its_deadline() -> None:
    roll = CompletionTracker(Parallel(tp=2))
    roll.begun(b"r", 0, deadline_ns=1)
    over(roll, 1)
    assert roll.expire(LATE + GRACE_NS - 1) == []
    [(_, error)] = roll.expire(LATE + GRACE_NS)
    assert isinstance(error, DeadlineExceeded)
    assert "[0]" in str(error)


def test_failures_are_remembered_for_late_reports() -> None:
    roll = CompletionTracker(Parallel(tp=2))
    over(roll, 1, Cancelled("enough"))
    roll.expire(LATE + GRACE_NS - 1)
    assert over(roll, 0) is None
    assert len(roll) == 0
    roll.expire(LATE + GRACE_NS)
    assert over(roll, 0) is None
    assert len(roll) == 1


class Wire:
    """Links that bring a message at once."""

    def __init__(self, scene: "Scene", rank: int) -> None:
        self._scene, self._rank = scene, rank
        self.opened: list[int] = []

    def open(self, info: RankInfo) -> None:
        self.opened.append(info.rank)

    def send_request(self, info: RankInfo, message: Message, *, deadline_s: float, on_answer: Callable[[Any], None]) -> None:
        assert isinstance(message, RankReport | RequestEnded)
        self._scene.executors[info.rank].received(self._scene.infos[self._rank], message, DEADLINE_NS)
        on_answer(None)


class Scene:
    """Executors of all ranks, with the failures that each received."""

    def __init__(self, *, joins: bool = True, **sizes: Any) -> None:
        self.reactor = Reactor(lambda: 0)
        layout = layout_of(**sizes)
        ranks = range(layout.parallel.ranks)
        address = Address(host="127.0.0.1", port=1)
        self.infos = [RankInfo(instance=bytes([rank] * 16), rank=rank, control=address, layout=layout, engine=b"") for rank in ranks]
        self.failed: list[list[tuple[bytes, KVStoreError]]] = [[] for _ in ranks]
        self.wires = [Wire(self, rank) for rank in ranks]
        self.executors = [self._executor(layout.parallel, rank) for rank in ranks]
        for one in self.executors if joins else ():
            one.join(self.infos)

    def _executor(self, parallel: Parallel, rank: int) -> CompletionCoordinator:
        wires: Any = self.wires[rank]
        return CompletionCoordinator(parallel, rank, self.reactor, wires, lambda *what: self.failed[rank].append(what))

    def over(self, rank: int, error: KVStoreError | None = None) -> None:
        handle = SendHandle(b"r", limit_s=1)
        handle.finish(error)
        self.executors[rank].over(handle, DEADLINE_NS)

    def finished(self) -> list[list[RequestOutcome]]:
        return [one.take_finished() for one in self.executors]


def test_request_is_finished_once_over_on_every_rank() -> None:
    scene = Scene(pp=3)
    assert [wire.opened for wire in scene.wires] == [[], [0], [0]]
    for one in scene.executors:
        one.begun(b"r", DEADLINE_NS)
    scene.over(2)
    scene.over(0)
    assert scene.finished() == [[], [], []]
    scene.over(1)
    assert scene.finished() == [[RequestOutcome(b"r", None)]] * 3
    assert scene.failed == [[], [], []]


def test_a_failure_is_told_to_all_and_finished_where_it_is_over() -> None:
    scene = Scene(pp=3)
    scene.over(1)
    scene.executors[2].begun(b"r", DEADLINE_NS)
    error = Cancelled("enough")
    scene.over(0, error)
    assert [[type(outcome.error) for outcome in finished] for finished in scene.finished()] == [[Cancelled], [Cancelled], []]
    assert [len(told) for told in scene.failed] == [1, 1, 1]
    scene.over(2, scene.failed[2][0][1])
    assert [len(finished) for finished in scene.finished()] == [0, 0, 1]
    assert all(isinstance(one.failure_of(b"r"), Cancelled) for one in scene.executors)


@pytest.mark.parametrize("late", [0, 1])
def test_request_that_failed_elsewhere_finishes_with_that_error(late: int) -> None:
    scene = Scene(tp=2)
    for one in scene.executors:
        one.begun(b"r", DEADLINE_NS)
    scene.over(1 - late, Cancelled("enough"))
    scene.finished()
    assert [len(told) for told in scene.failed] == [1, 1]
    scene.over(late)
    [outcome] = scene.finished()[late]
    assert isinstance(outcome.error, Cancelled)
    for one in scene.executors:
        one.expire(DEADLINE_NS + 2 * GRACE_NS)
    assert scene.finished() == [[], []], "once each"


def test_reports_that_come_before_rank_0_has_joined_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EARLY_REQUESTS", 2)
    scene, stranger = Scene(pp=2, joins=False), Scene(pp=3).infos[2]
    scene.executors[1].join(scene.infos)
    scene.over(1)
    scene.executors[0].received(stranger, RankReport(b"x", 2), DEADLINE_NS)
    with pytest.raises(ProtocolError):
        scene.executors[0].received(stranger, RankReport(b"y", 2), DEADLINE_NS)
    scene.executors[0].join(scene.infos)
    assert scene.finished() == [[], []]
    scene.over(0)
    assert scene.finished() == [[RequestOutcome(b"r", None)]] * 2


def test_a_rank_that_dies_fails_what_it_had_not_finished() -> None:
    scene = Scene(pp=3)
    scene.over(1)
    scene.executors[0].lost(scene.infos[2])
    assert isinstance(scene.finished()[1][0].error, Unreachable)
    assert isinstance(scene.failed[0][0][1], Unreachable)


def test_without_rank_0_everything_has_failed() -> None:
    scene = Scene(pp=3)
    scene.executors[1].begun(b"begun", DEADLINE_NS)
    scene.over(1)
    scene.executors[1].lost(scene.infos[2])  # another one's death is rank 0's to tell
    assert scene.failed[1] == []
    scene.executors[1].lost(scene.infos[0])
    assert {request_id for request_id, _ in scene.failed[1]} == {b"begun", b"r"}
    assert [outcome.request_id for outcome in scene.finished()[1]] == [b"r"]


def test_report_of_a_foreign_rank_is_rejected() -> None:
    scene, other = Scene(tp=2), Scene(pp=3)
    stranger = RankInfo(instance=b"x" * 16, rank=1, control=scene.infos[0].control, layout=scene.infos[0].layout, engine=b"")
    for info in (stranger, other.infos[2]):
        with pytest.raises(ProtocolError, match="not a rank of the executor"):
            scene.executors[0].received(info, RankReport(b"r", 2), DEADLINE_NS)
        scene.over(1)
        scene.executors[0].lost(info)
    assert scene.failed == [[], []]


def test_what_is_not_decided_in_time_has_failed() -> None:
    scene = Scene(tp=2)
    scene.over(1)
    scene.executors[1].expire(DEADLINE_NS + 2 * GRACE_NS - 1)
    assert scene.finished()[1] == []
    scene.executors[1].expire(DEADLINE_NS + 2 * GRACE_NS)
    [outcome] = scene.finished()[1]
    assert isinstance(outcome.error, DeadlineExceeded)
    scene.executors[0].expire(DEADLINE_NS + GRACE_NS)
    assert [len(told) for told in scene.failed] == [1, 2]
