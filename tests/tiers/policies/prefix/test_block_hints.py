"""Hints in PrefixPolicy: what they change of the order in which blocks leave, and what they do not."""

import itertools
from collections.abc import Callable
from functools import cache

import pytest

from kvstore.kvcache.traces.named import generate
from kvstore.tiers.policies.prefix import ghosts
from kvstore.tiers.policies.prefix.policy import PrefixPolicy
from tests.tiers.policies.prefix.test_policy import Clock, evictions, store, words


def filled(clock: Clock, *names: str, blocks: int = 3) -> PrefixPolicy[str]:
    """A policy with one prompt a second for each name."""
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for name in names:
        store(policy, words(name, blocks))
        clock.now_s += 1
    store(policy, ["last"])
    return policy


def hint(policy: PrefixPolicy[str], name: str, priority: int, blocks: int = 3) -> None:
    for key in words(name, blocks):
        policy.set_priority(key, priority)
    policy.check_integrity()


def order(policy: PrefixPolicy[str], *names: str) -> list[str]:
    """Names of prompts in the order in which their first blocks leave."""
    return [key[0] for key in evictions(policy) if key in {f"{name}0" for name in names}]


def test_priority_0_leaves_first_and_100_last() -> None:
    policy = filled(Clock(), "a", "b", "c")
    hint(policy, "c", 0)
    hint(policy, "a", 100)
    gone = evictions(policy)
    assert gone[:3] == ["c2", "c1", "c0"], "from its end"
    assert gone.index("b0") < gone.index("a0")


def test_orphans_leave_before_priority_0() -> None:
    policy = filled(Clock(), "a", "b", "c")
    policy.remove("b1")
    hint(policy, "c", 0)
    policy.set_priority("b2", 100)
    policy.expect_reuse("b2", 1.0)
    policy.check_integrity()
    assert policy.victim() == "b2"


def test_priority_50_is_as_without_a_hint() -> None:
    plain, hinted = filled(Clock(), "a", "b", "c"), filled(Clock(), "a", "b", "c")
    for priority in (0, 100, 50):
        hint(hinted, "b", priority)
    assert sorted(evictions(hinted)) == sorted(evictions(plain))
    hinted = filled(Clock(), "a", "b", "c")
    hint(hinted, "b", 50)
    assert hinted.model.estimate.hints is None
    assert evictions(hinted) == evictions(filled(Clock(), "a", "b", "c"))


def test_a_removed_block_loses_its_priority() -> None:
    clock = Clock()
    policy = filled(clock, "a", "b")
    hint(policy, "b", 0)
    for key in reversed(words("b", 3)):
        policy.remove(key)
    store(policy, words("b", 3))
    store(policy, ["end"])
    policy.check_integrity()
    assert order(policy, "a", "b") == ["a", "b"]


def test_a_priority_survives_reads() -> None:
    policy = filled(Clock(), "a", "b")
    hint(policy, "b", 0)
    store(policy, words("b", 3))
    store(policy, ["end"])
    policy.check_integrity()
    assert policy.victim() == "b2"


def test_lone_blocks_heed_hints() -> None:
    """Blocks without parents are kept as runs until a hint names one."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    policy.insert_all(words("a", 8))
    clock.now_s += 1
    policy.insert_all(words("b", 8))
    policy.set_priority("b4", 0)
    policy.set_priority("a3", 100)
    policy.expect_reuse("a4", 0.5)
    policy.check_integrity()
    gone = evictions(policy)
    assert gone[0] == "b4"
    assert [key for key in gone if key[0] == "a"][-3:] == ["a3", "a7", "a4"]


def play_expecting(policy: PrefixPolicy[str], clock: Clock, rounds: int, tell: Callable[[str], float | None]) -> None:
    """Each 10 s a prompt that is read again 60 s later, and one that is not; `tell` gives the time to expect of each."""
    for index in range(rounds):
        clock.now_s = index * 10.0
        for name in (f"a{index}-", f"o{index}-"):
            store(policy, words(name, 3))
            after_s = tell(name)
            if after_s is not None:
                for key in words(name, 3):
                    policy.expect_reuse(key, after_s)
        if index >= 6:
            store(policy, words(f"a{index - 6}-", 3))
        while len(policy) > 24:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
    policy.check_integrity()


def test_blocks_expected_soon_stay() -> None:
    """Nothing else tells the two kinds of prompts apart."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    play_expecting(policy, clock, 300, lambda name: 60.0 if name[0] == "a" else None)
    assert all(f"a{index}-1" in policy for index in range(294, 300))


def test_after_twice_the_time_a_block_is_as_others() -> None:
    clock = Clock()
    policy = filled(clock, "a", "b")
    policy.expect_reuse("a2", 10.0)
    policy.expect_reuse("absent", 10.0)
    assert policy.model.estimate.hints is not None
    assert policy.model.estimate.hints.expected("a2") is not None
    clock.now_s += 21
    store(policy, ["c"])
    store(policy, ["d"])
    policy.check_integrity()
    assert policy.model.estimate.hints.expected("a2") is None


def test_a_read_ends_an_expectation() -> None:
    policy = filled(Clock(), "a", "b")
    policy.expect_reuse("a2", 10.0)
    policy.expect_reuse("b2", 10.0)
    store(policy, words("a", 3))
    policy.remove("b2")
    policy.insert("b2", "b1")
    policy.check_integrity()
    assert policy.model.estimate.hints is not None
    assert policy.model.estimate.hints.expected("a2") is policy.model.estimate.hints.expected("b2") is None


@cache
def victims_of(priority: int | None) -> list[int]:
    """Blocks in the order in which they leave while conversations are replayed, all of them with one priority."""
    clock, gone = Clock(), list[int]()
    policy: PrefixPolicy[int] = PrefixPolicy(clock=clock)
    for request in itertools.islice(generate(seed=5), 800):
        clock.now_s = request.timestamp_ms / 1000
        parent = None
        for block in request.hash_ids:
            if block in policy:
                policy.touch(block)
            else:
                if len(policy) == 1000:
                    gone += policy.take_victims(1, lambda key: True, lambda key: True)
                policy.insert(block, parent)
            if priority is not None:
                policy.set_priority(block, priority)
            parent = block
    policy.check_integrity()
    return gone


@pytest.mark.parametrize("priority", [0, 30, 100])
def test_one_priority_for_all_blocks_changes_nothing(priority: int) -> None:
    assert victims_of(priority) == victims_of(None)


def test_hints_are_forgotten_with_their_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "MIN_GHOSTS", 10)
    policy: PrefixPolicy[int] = PrefixPolicy(clock=Clock())
    for key in range(1000):
        policy.insert(key)
        policy.set_priority(key, 70)
        policy.expect_reuse(key, 5.0)
        if len(policy) > 5:
            policy.take_victims(1, lambda key: True, lambda key: True)
    policy.check_integrity()
    hints = policy.model.estimate.hints
    assert hints is not None
    assert len(hints._levels) <= 30
    policy.forget(100)
    policy.check_integrity()


def test_released_blocks_have_no_hints() -> None:
    policy = filled(Clock(), "a", "b")
    hint(policy, "a", 100)
    policy.expect_reuse("a1", 5.0)
    for key in words("a", 3):
        policy.release(key)
    policy.check_integrity()
    assert policy.model.estimate.hints is not None
    assert not policy.model.estimate.hints._levels
    assert not policy.model.estimate.hints._expected
