"""Tests of instances.py; a state machine compares it with a naive model that sums up everything each time."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.master.scheduling import instances as module
from kvstore.master.scheduling.instances import DecodeMember, Instances, PrefillMember, PromisedWork
from kvstore.protocol.errors import Full
from tests.master.blocks import S
from tests.master.scheduling.reports import both, decode, prefill


def instances(*, max_instances: int = 10) -> Instances:
    return Instances(instance_ttl_s=5.0, max_instances=max_instances)


def to_prefill(at_s: float, prefill_s: float, *, ttl_s: float = 3.0) -> PromisedWork:
    return PromisedWork(int(at_s * S), int((at_s + ttl_s) * S), prefill_ns=int(prefill_s * S))


def to_decode(at_s: float, tokens: int, *, ttl_s: float = 3.0) -> PromisedWork:
    return PromisedWork(int(at_s * S), int((at_s + ttl_s) * S), context_tokens=tokens)


def test_instance_joins_by_report_and_expires() -> None:
    known = instances()
    known.report(prefill("a"), 0)
    known.report(decode("b"), 0)
    known.report(prefill("a"), 3 * S)
    assert known.expire(5 * S - 1) == []
    assert known.expire(5 * S) == ["b"]
    assert (list(known.prefill), list(known.decode)) == (["a"], [])
    assert known.expire(8 * S) == ["a"]
    assert known.get("a") is None


def test_one_that_does_both_is_in_either_list_and_counts_once() -> None:
    known = instances(max_instances=2)
    known.report(both("a", batch=2, context_tokens=50), 0)
    known.report(decode("d"), 0)
    assert (list(known.prefill), sorted(known.decode)) == (["a"], ["a", "d"])
    assert [member.report.name for member in known.each()] == ["a", "d"]
    assert (known.decode["a"].view(0).is_own, known.decode["d"].view(0).is_own) == (True, False)
    known.check_integrity()
    with pytest.raises(Full):
        known.report(prefill("c"), 0)
    known.report(both("a", batch=3), S)
    assert known.decode["a"].view(S).batch == 3
    assert known.expire(5 * S) == ["d"]
    known.report(prefill("a"), 5 * S)
    assert (list(known.prefill), list(known.decode)) == (["a"], [])
    known.report(both("a"), 5 * S)
    known.leave("a")
    assert known.each() == []


def test_overdue_promises_are_in_the_report() -> None:
    known = instances()
    known.report(prefill("a", seen_after_s=1.0), 0)
    member = known.prefill["a"]
    member.promise(1, to_prefill(0, 0.5))
    member.promise(2, to_prefill(1.5, 0.5))
    known.report(prefill("a", seen_after_s=1.0), S - 1)
    assert member.unseen_requests == 2
    known.report(prefill("a", seen_after_s=1.0), S)
    assert (member.unseen_requests, member.unseen_s) == (1, 0.5)
    known.report(prefill("a"), 2 * S)
    assert member.unseen_requests == 1


def test_own_prefill_is_in_the_report_from_sending() -> None:
    known = instances()
    known.report(both("a"), 0)
    member = known.decode["a"]
    member.promise(1, to_decode(20, 30)._replace(sent_ns=0))
    member.promise(2, to_decode(20, 30)._replace(sent_ns=S // 2))
    member.promise(3, to_decode(20, 30))
    assert member.arrivals_s().tolist() == [20, 20, 20]
    known.report(both("a", seen_after_s=1.0, context_tokens=30), S)
    assert (member.unseen_requests, member.view(S).context_tokens) == (2, 90)
    known.report(both("a", seen_after_s=1.0, context_tokens=60), 2 * S)
    assert (member.unseen_requests, member.view(2 * S).context_tokens) == (1, 90)


def test_instances_over_the_limit_are_refused() -> None:
    known = instances(max_instances=2)
    known.report(prefill("a"), 0)
    known.report(decode("b"), 0)
    with pytest.raises(Full, match=r"2 instances already.*'c' cannot join"):
        known.report(prefill("c"), 0)
    known.report(prefill("a", queue_s=1), 0)
    known.report(prefill("b"), 0)
    assert sorted(known.prefill) == ["a", "b"]
    known.check_integrity()


def test_under_a_new_role_it_is_another_instance() -> None:
    known = instances()
    known.report(prefill("a"), 0)
    known.prefill["a"].promise(1, to_prefill(0, 1))
    known.report(decode("a"), 0)
    member = known.get("a")
    assert isinstance(member, DecodeMember)
    assert (member.unseen_requests, member.scheduled) == (0, 0)


def test_two_engines_of_one_name_are_told_of_once_for_each_two() -> None:
    known = instances()
    addresses = ["http://x", "http://y", "http://z"] * 3
    told = [known.report(prefill("a", address=address), number) for number, address in enumerate(addresses)]
    assert told == ["", "", "", "", "http://x", "http://y", "http://z", "", ""]
    known.leave("a")
    assert [known.report(prefill("a", address=address), S) for address in addresses[:2]] == ["", ""]
    assert known.report(decode("a", address="http://x"), S) == "http://y", "under another role, too"
    known.check_integrity()


def test_an_engine_that_is_started_anew_elsewhere_is_no_other() -> None:
    known = instances()
    for number, address in enumerate(["http://x", "http://x", "http://y", "http://x", "http://y"]):
        assert known.report(prefill("a", address=address), number * 5 * S) == ""


def test_moves_without_end_are_not_remembered_without_end() -> None:
    known = instances()
    for number in range(2 * module.MAX_MOVES):
        known.report(prefill("a", address=f"http://{number}"), 0)
        known.check_integrity()
    assert known.report(prefill("a", address=f"http://{number - 1}"), 0) == ""


def test_a_kept_report_has_no_lists() -> None:
    known = instances()
    known.report(prefill("a", seen_request_ids=[1], queue_s=2), 0)
    member = known.get("a")
    assert member is not None
    assert member.report == prefill("a", queue_s=2)


def test_a_queue_shrinks_with_time_and_grows_with_promises() -> None:
    member = PrefillMember(prefill(queue_s=4), 0)
    assert member.view(1 * S).queue_s == 3
    member.promise(1, to_prefill(1, 2))
    assert member.view(1 * S).queue_s == 5
    assert member.view(2 * S).queue_s == 4
    assert (member.unseen_requests, member.unseen_s, member.scheduled) == (1, 2, 1)


def test_unseen_promises_add_to_the_report() -> None:
    member = PrefillMember(prefill(), 0)
    member.promise(1, to_prefill(0, 2))
    member.promise(2, to_prefill(0, 1))
    member.renew(prefill(queue_s=1.5), [1, 99], int(0.5 * S))
    assert member.view(int(0.5 * S)).queue_s == 2.5
    assert (member.unseen_requests, member.scheduled) == (1, 2)


def test_beyond_the_limit_the_oldest_promise_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMISED", 2)
    member = PrefillMember(prefill(), 0)
    for number, prefill_s in enumerate((1, 2, 4)):
        member.promise(number, to_prefill(0, prefill_s))
    assert (member.unseen_requests, member.view(0).queue_s) == (2, 6)


def test_transfers_are_backlog_until_due_or_reported() -> None:
    member = PrefillMember(prefill(send_bytes_per_s=100.0, send_backlog_bytes=50), 0)
    member.send(200, 0)
    assert (member.view(0).send_backlog_bytes, member.view(1 * S).send_backlog_bytes, member.view(3 * S).send_backlog_bytes) == (
        250,
        150,
        0,
    )
    member.send(100, 3 * S)
    assert member.view(3 * S).send_backlog_bytes == 100
    member.renew(prefill(send_bytes_per_s=10.0, send_backlog_bytes=70), [], 3 * S)
    assert (member.view(3 * S).send_backlog_bytes, member.view(3 * S).send_bytes_per_s) == (70, 10)


def test_where_an_instance_is_and_what_came_there_is_in_its_view() -> None:
    member = PrefillMember(prefill(), 0)
    assert (member.view(0).place, member.view(0).received_bytes_per_s) == (None, {})
    member.at(3, {4: 5.0})
    assert (member.view(0).place, member.view(0).received_bytes_per_s) == (3, {4: 5.0})


def test_promised_sequences_are_in_the_batch_before_they_come_in() -> None:
    member = DecodeMember(decode(batch=2, context_tokens=100, capacity_tokens=1000), 0)
    member.promise(1, to_decode(2, 30))
    view = member.view(0)
    assert (view.batch, view.context_tokens, view.capacity_tokens) == (3, 130, 1000)
    assert member.arrivals_s().tolist() == [2]
    assert member.view(5 * S).batch == 2
    assert DecodeMember(decode(), 0).view(0).capacity_tokens == 1 << 62


@dataclass
class Naive:
    """One prefill instance, computed naively from its history."""

    queue_s: float
    reported_s: int
    promises: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    def queue_at(self, now_s: int) -> float:
        free_s = self.reported_s + self.queue_s
        for at_s, prefill_s, expires_s in self.promises.values():
            if expires_s > now_s:
                free_s = max(free_s, at_s) + prefill_s
        return max(0.0, free_s - now_s)


class Machine(RuleBasedStateMachine):
    """Whole and half seconds, so that both compute exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Instances(instance_ttl_s=6.0, max_instances=3)
        self.naive: dict[str, Naive] = {}
        self.now_s = 0
        self.last_id = 0

    names = st.sampled_from("abcde")
    halves = st.integers(0, 20).map(lambda count: count / 2)

    @rule(name=names, queue_s=halves, seen=st.sets(st.integers(1, 30)))
    def report(self, name: str, queue_s: float, seen: set[int]) -> None:
        report = prefill(name, queue_s=queue_s, seen_request_ids=sorted(seen))
        if name not in self.naive and len(self.naive) == 3:
            with pytest.raises(Full):
                self.known.report(report, self.now_s * S)
            return
        self.known.report(report, self.now_s * S)
        model = self.naive.setdefault(name, Naive(0, 0))
        model.queue_s, model.reported_s = queue_s, self.now_s
        model.promises = {number: promise for number, promise in model.promises.items() if number not in seen}

    @rule(name=names, prefill_s=halves, ttl_s=st.integers(1, 8))
    def promise(self, name: str, prefill_s: float, ttl_s: int) -> None:
        if name in self.naive:
            self.last_id += 1
            self.known.prefill[name].promise(self.last_id, to_prefill(self.now_s, prefill_s, ttl_s=ttl_s))
            self.naive[name].promises[self.last_id] = (self.now_s, prefill_s, self.now_s + ttl_s)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.known.leave(name)
        self.naive.pop(name, None)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        silent = [name for name, model in self.naive.items() if model.reported_s + 6 <= self.now_s]
        assert sorted(self.known.expire(self.now_s * S)) == sorted(silent)
        for name in silent:
            del self.naive[name]

    @invariant()
    def agrees(self) -> None:
        self.known.check_integrity()
        assert self.known.prefill.keys() == self.naive.keys()
        for name, model in self.naive.items():
            assert math.isclose(self.known.prefill[name].view(self.now_s * S).queue_s, model.queue_at(self.now_s))
            waiting = [promise for promise in model.promises.values() if promise[2] > self.now_s]
            assert self.known.prefill[name].unseen_requests == len(waiting)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestMachine = Machine.TestCase
