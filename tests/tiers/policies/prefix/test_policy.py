"""The prefix-aware policy: evicts leaves only, orphans first, and keeps blocks whose reuse was learned."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.kvcache.traces.named import generate
from kvstore.testing.policy_conformance import PolicyConformance
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import DictStates, EvictionPolicy
from kvstore.tiers.policies.lru import LRU
from kvstore.tiers.policies.prefix import ghosts
from kvstore.tiers.policies.prefix.model import PASSED_PER_BLOCK, PrefixModel
from kvstore.tiers.policies.prefix.policy import PrefixFamily, PrefixPolicy


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ticking() -> Callable[[], float]:
    """A clock on which every look takes 0.2 s."""
    return itertools.count(0.0, 0.2).__next__


class TestPrefixPolicy(PolicyConformance):
    def make_policy(self) -> EvictionPolicy[int]:
        return PrefixPolicy(clock=ticking())


class PrefixMachine(RuleBasedStateMachine):
    """Any schedule, parents present or not: the tree stays whole and a victim is a leaf unless every leaf is refused."""

    KEYS = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.policy: PrefixPolicy[int] = PrefixPolicy(clock=self.clock)
        self.one_by_one: PrefixPolicy[int] = PrefixPolicy(clock=self.clock)
        """Gets batches key by key, and must decide the same."""
        self.parents: dict[int, int | None] = {}

    @rule(keys=st.lists(KEYS, max_size=6), has_parents=st.booleans())
    def insert_all(self, keys: list[int], has_parents: bool) -> None:
        parents = [key // 2 if key else None for key in keys] if has_parents else None
        self.policy.insert_all(keys, parents)
        for at, key in enumerate(keys):
            parent = parents[at] if parents is not None else None
            self.one_by_one.insert(key, parent)
            self.parents.setdefault(key, parent)

    @rule(key=KEYS, seconds=st.sampled_from([0.0, 0.01, 1.0, 500.0]))
    def insert(self, key: int, seconds: float) -> None:
        self.clock.now_s += seconds
        parent = key // 2 if key else None
        self.policy.insert(key, parent)
        self.one_by_one.insert(key, parent)
        self.parents.setdefault(key, parent)

    @rule(key=KEYS)
    def insert_alone(self, key: int) -> None:
        self.policy.insert(key)
        self.one_by_one.insert(key)
        self.parents.setdefault(key, None)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        self.policy.touch(key)
        self.one_by_one.touch(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        self.policy.remove(key)
        self.one_by_one.remove(key)
        self.parents.pop(key, None)

    @rule(key=KEYS, priority=st.sampled_from([0, 20, 50, 70, 100]))
    def set_priority(self, key: int, priority: int) -> None:
        self.policy.set_priority(key, priority)
        self.one_by_one.set_priority(key, priority)

    @rule(key=KEYS, seconds=st.sampled_from([0.001, 1.0, 10.0, 600.0, 1e6]))
    def expect_reuse(self, key: int, seconds: float) -> None:
        self.policy.expect_reuse(key, seconds)
        self.one_by_one.expect_reuse(key, seconds)

    @rule(key=KEYS)
    def release(self, key: int) -> None:
        self.policy.release(key)
        self.one_by_one.release(key)
        self.parents.pop(key, None)

    @rule(refused=st.frozensets(KEYS, max_size=4), take=st.booleans())
    def evict(self, refused: frozenset[int], take: bool) -> None:
        victim = self.policy.victim(lambda key: key not in refused)
        leaves = self.parents.keys() - set(self.parents.values())
        allowed = (leaves - refused) or (self.parents.keys() - refused)
        assert victim in allowed if allowed else victim is None
        assert victim == self.one_by_one.victim(lambda key: key not in refused)
        if victim is not None and take:
            self.remove(victim)

    @rule(count=st.integers(0, 6), refused=st.frozensets(KEYS, max_size=3), staying=st.frozensets(KEYS, max_size=2))
    def evict_many(self, count: int, refused: frozenset[int], staying: frozenset[int]) -> None:
        taken = self.policy.take_victims(count, lambda key: key not in refused, lambda key: key not in staying)
        for key in taken:
            assert key not in staying
            assert key == self.one_by_one.victim(lambda key: key not in refused)
            self.one_by_one.remove(key)
            self.parents.pop(key)
        if len(taken) < count:
            assert self.one_by_one.victim(lambda key: key not in refused) in (None, *staying)

    @invariant()
    def the_same_keys_are_present(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.parents)
        assert all(key in self.policy for key in self.parents)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = MACHINE_SETTINGS


class FamilyMachine(RuleBasedStateMachine):
    """Any schedule of copies between tiers: each policy knows its keys, and its victim has no child in its tier or a
    faster one, unless every leaf is refused."""

    KEYS = st.integers(0, 11)
    TIERS = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        family = PrefixFamily[int](clock=self.clock)
        self.policies = [family.policy(tier) for tier in range(3)]
        self.present: list[set[int]] = [set(), set(), set()]
        self.parents: dict[int, int | None] = {}

    @rule(key=KEYS, tier=TIERS, is_alone=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 500.0]))
    def insert(self, key: int, tier: int, is_alone: bool, seconds: float) -> None:
        self.clock.now_s += seconds
        parent = key // 2 if key and not is_alone else None
        self.policies[tier].insert(key, parent)
        if not any(key in keys for keys in self.present):
            self.parents[key] = parent
        self.present[tier].add(key)

    @rule(keys=st.lists(KEYS, min_size=3, max_size=6, unique=True), tier=TIERS)
    def insert_alone(self, keys: list[int], tier: int) -> None:
        self.policies[tier].insert_all(keys)
        for key in keys:
            if not any(key in present for present in self.present):
                self.parents[key] = None
            self.present[tier].add(key)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        for policy in self.policies:
            policy.touch(key)

    @rule(key=KEYS, tier=TIERS, priority=st.sampled_from([0, 50, 100]))
    def set_priority(self, key: int, tier: int, priority: int) -> None:
        self.policies[tier].set_priority(key, priority)

    @rule(key=KEYS, tier=TIERS, after_s=st.sampled_from([0.1, 10.0, 1000.0]))
    def expect_reuse(self, key: int, tier: int, after_s: float) -> None:
        self.policies[tier].expect_reuse(key, after_s)

    @rule(key=KEYS, tier=TIERS, is_released=st.booleans())
    def remove(self, key: int, tier: int, is_released: bool) -> None:
        if is_released:
            self.policies[tier].release(key)
        else:
            self.policies[tier].remove(key)
        self.present[tier].discard(key)

    @rule(tier=TIERS, refused=st.frozensets(KEYS, max_size=4), take=st.booleans())
    def evict(self, tier: int, refused: frozenset[int], take: bool) -> None:
        victim = self.policies[tier].victim(lambda key: key not in refused)
        with_child = {self.parents[key] for keys in self.present[: tier + 1] for key in keys}
        mine = self.present[tier] - refused
        allowed = mine - with_child or mine
        assert victim in allowed if allowed else victim is None
        if victim is not None and take:
            self.remove(victim, tier, False)

    @rule(tier=TIERS, count=st.integers(0, 6), staying=st.frozensets(KEYS, max_size=2))
    def evict_many(self, tier: int, count: int, staying: frozenset[int]) -> None:
        taken = self.policies[tier].take_victims(count, lambda _key: True, lambda key: key not in staying)
        assert self.present[tier].issuperset(taken)
        assert staying.isdisjoint(taken)
        self.present[tier] -= set(taken)

    @invariant()
    def each_policy_has_its_keys(self) -> None:
        for policy, present in zip(self.policies, self.present, strict=True):
            policy.check_integrity()
            assert len(policy) == len(present)
            assert all((key in policy) == (key in present) for key in range(12))


TestFamilyMachine = FamilyMachine.TestCase
TestFamilyMachine.settings = MACHINE_SETTINGS


def test_a_demoted_block_keeps_its_visits() -> None:
    """Its reads in DRAM make it worth more than a block that was never read and is younger."""
    clock = Clock()
    family = PrefixFamily[str](clock=clock)
    dram, nvme = family.policy(1), family.policy(2)
    play(dram, clock, 300)
    kept = [key for key in ("again298-1", "again299-1") if key in dram]
    store(dram, words("new", 1))
    clock.now_s += 60
    store(dram, words("end", 1))
    for key in (*kept, "new0"):
        nvme.insert(key)
        dram.remove(key)
    assert kept
    assert all((nvme.worth(key) or 0) > (nvme.worth("new0") or 0) for key in kept if nvme.worth(key) is not None)
    assert nvme.victim() == "new0"
    nvme.check_integrity()


def test_a_prompt_is_demoted_and_dropped_from_its_end() -> None:
    family = PrefixFamily[str](clock=ticking())
    dram, nvme = family.policy(1), family.policy(2)
    store(dram, words("a", 4))
    store(dram, words("end", 1))
    for expected in ("a3", "a2", "a1"):
        victim = dram.victim(lambda key: key != "end0")
        assert victim == expected
        nvme.insert(victim)
        dram.remove(victim)
    assert [nvme.victim(), nvme.victim(lambda key: key != "a3")] == ["a3", "a1"]


def test_the_next_victim_of_a_prompt_is_known_in_advance() -> None:
    family = PrefixFamily[str](clock=ticking())
    dram, nvme = family.policy(1), family.policy(2)
    store(dram, words("a", 4))
    store(dram, words("end", 1))
    assert [dram.next_after(key) for key in ("a3", "a0", "absent")] == ["a2", None, None]
    assert (dram.worth("a2") or 0) >= (dram.worth("a3") or 1), "a3 is the last block of the prompt"
    nvme.insert("a3")
    assert (dram.next_after("a3"), nvme.next_after("a3")) == ("a2", None)
    dram.insert("b", "a2")
    dram.touch("end0")
    assert dram.next_after("a3") is None, "a2 has another child"


def test_ghosts_of_a_family_stay_until_its_last_policy_closes() -> None:
    family = PrefixFamily[str](clock=ticking())
    dram, nvme = family.policy(1), family.policy(2)
    dram.insert("a")
    dram.remove("a")
    assert (dram.remembered, nvme.remembered) == (1, 1)
    assert dram.close() == 0
    assert nvme.close() == 1


def store(policy: EvictionPolicy[str], prompt: Iterable[str]) -> None:
    """Read or store the prompt's blocks: a key a word, its parent the word before."""
    parent = None
    for key in prompt:
        if key in policy:
            policy.touch(key)
        else:
            policy.insert(key, parent)
        parent = key


def evictions(policy: PrefixPolicy[str]) -> list[str]:
    evicted = []
    while (victim := policy.victim()) is not None:
        policy.remove(victim)
        policy.check_integrity()
        evicted.append(victim)
    return evicted


@pytest.mark.parametrize(("removed", "released"), [("a", "b"), ("b", "a")])
def test_children_of_released_blocks_are_no_orphans(removed: str, released: str) -> None:
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for prompt in (words("a", 2), words("b", 2), words("c", 1)):
        store(policy, prompt)
        clock.now_s += 1
    policy.release(f"{released}0")
    policy.remove(f"{removed}0")
    assert evictions(policy)[0] == f"{removed}1", "the orphan, whichever is older"


def test_released_blocks_are_no_ghosts() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=Clock())
    store(policy, words("a", 4))
    for key in words("a", 4):
        policy.release(key)
    policy.release("absent")
    policy.check_integrity()
    assert (len(policy), policy.remembered) == (0, 0)


def words(name: str, count: int) -> list[str]:
    return [f"{name}{index}" for index in range(count)]


def test_prefix_evicts_a_shrinking_prompt_before_the_next() -> None:
    """But for last blocks, of which none has been read again yet."""
    policy: PrefixPolicy[str] = PrefixPolicy(clock=ticking())
    for name in "abc":
        store(policy, words(name, 4))
    gone = [key for key in evictions(policy) if key[1] != "3"]
    assert gone[:6] in (["a2", "a1", "a0", "b2", "b1", "b0"], ["b2", "b1", "b0", "a2", "a1", "a0"])


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=ticking())
    parent = None
    for key in words("p", 30):
        if len(policy) == 10:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
        policy.insert(key, parent)
        policy.check_integrity()
        parent = key
    assert all(key in policy for key in words("p", 9))


def test_orphans_leave_first_until_their_parent_is_back() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=ticking())
    store(policy, ["a", "b", "c"])
    store(policy, ["x"])
    policy.remove("b")
    assert policy.victim() == "c"
    policy.insert("b", "a")
    store(policy, ["y"])
    policy.check_integrity()
    assert policy.victim() in ("x", "c")
    policy.remove("a")
    policy.check_integrity()
    policy.insert("d", "a")
    assert policy.victim() == "d"


def test_prefix_accepts_children_without_parents() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=ticking())
    for key, parent in (("b1", "a"), ("b2", "a"), ("c", "b2"), ("x", None)):
        policy.insert(key, parent)
        policy.check_integrity()
    policy.remove("b1")
    policy.check_integrity()
    policy.insert("a")
    policy.check_integrity()
    policy.remove("a")
    policy.check_integrity()
    policy.remove("b2")
    policy.check_integrity()
    assert len(policy) == 2


def test_inner_blocks_leave_when_every_leaf_is_in_use() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=ticking())
    store(policy, ["a", "b"])
    store(policy, ["x"])
    assert policy.victim(lambda key: key == "a") == "a"


def test_prefix_scan_is_bounded_when_all_leaves_are_in_use() -> None:
    class Passing(DictStates[str, Any]):
        passed = 0

        def items(self) -> Any:
            for item in super().items():
                Passing.passed += 1
                yield item

    policy = PrefixPolicy[str](PrefixModel(nodes=Passing(), clock=Clock()))
    prompts = [words(f"prompt {number} ", 500) for number in range(10)]
    for prompt in prompts:
        store(policy, prompt)
    Passing.passed = 0
    ends = {prompt[-1] for prompt in prompts}
    assert policy.victim(lambda key: key not in ends) == prompts[0][0]
    assert Passing.passed == 1
    assert policy.victim(lambda key: key == prompts[0][10]) == prompts[0][10]
    assert Passing.passed <= 20


def play(policy: EvictionPolicy[str], clock: Clock, rounds: int) -> None:
    """Each 10 s a short prompt that is read again after 20 s, and a long one that is never read again; ghosts teach as residents do."""
    for index in range(rounds):
        clock.now_s = index * 10.0
        store(policy, words(f"again{index}-", 3))
        store(policy, words(f"once{index}-", 40))
        if index >= 2:
            store(policy, words(f"again{index - 2}-", 3))
        while len(policy) > 12:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)


def test_what_was_learned_to_come_back_stays() -> None:
    """LRU would keep the newest prompts, long and short."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    play(policy, clock, 300)
    policy.check_integrity()
    assert all(f"again{index}-1" in policy for index in (298, 299))
    assert sum(key in policy for index in (298, 299) for key in words(f"once{index}-", 40)) <= 12 - 6


def test_last_blocks_leave_first_where_they_never_come_back() -> None:
    """An unfinished last block has a key in traces, which the next turn does not repeat."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for index in range(200):
        clock.now_s = index * 3.0
        store(policy, [*words(f"talk{index}-", 6), f"unfinished{index}"])
        if index >= 3:
            store(policy, [*words(f"talk{index - 3}-", 8), f"more{index - 3}"])
    first = [policy.victim()]
    for _ in range(50):
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
        first.append(victim)
    assert all(key is not None and key.startswith(("unfinished", "more")) for key in first)


def test_a_prefix_that_many_share_outlives_what_hangs_on_it() -> None:
    """And so do all of its blocks, though only the last one has many children."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for index in range(100):
        clock.now_s = index * 5.0
        store(policy, [*words("system", 4), *words(f"question{index}-", 3)])
    store(policy, words("end", 1))
    gone = evictions(policy)
    assert set(words("system", 4)) <= set(gone[-5:])


def test_prefix_evicts_lone_blocks_in_batches_and_readmits_them() -> None:
    clock = Clock()
    many, singles = PrefixPolicy[str](clock=clock), PrefixPolicy[str](clock=clock)
    for policy in (many, singles):
        clock.now_s = 0.0
        for index in range(2):
            policy.insert_all(words(f"p{index}-", 6))
            clock.now_s += 20.0
        store(policy, ["a", "b"])
    gone = many.take_victims(9, lambda key: key != "p0-3", lambda key: key != "p1-4")
    for key in gone:
        assert singles.victim(lambda key: key != "p0-3") == key
        singles.remove(key)
    assert len(gone) == 9
    for policy in (many, singles):
        policy.insert(gone[1])
        policy.insert(gone[4], "b")
        policy.check_integrity()
    assert many.take_victims(3, lambda key: key != "p0-3", lambda key: key != "p1-4") == []
    assert many.model.estimate.log.hazard._watched == pytest.approx(singles.model.estimate.log.hazard._watched)
    left = evictions(singles)
    assert many.take_victims(len(left), lambda key: True, lambda key: True) == left
    assert many.take_victims(1, lambda key: True, lambda key: True) == []
    many.check_integrity()


def evictions_of(policy: PrefixPolicy[str], count: int) -> list[str]:
    gone = []
    for _ in range(count):
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
        gone.append(victim)
    return gone


def test_ghosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "MIN_GHOSTS", 10)
    policy: PrefixPolicy[int] = PrefixPolicy(clock=ticking())
    for key in range(1000):
        policy.insert(key)
        if len(policy) > 5:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
    assert len(policy.model.ghosts) <= 21


def test_the_ghosts_of_those_that_left_first_are_forgotten_first() -> None:
    policy: PrefixPolicy[int] = PrefixPolicy(clock=ticking())
    for key in range(5):
        policy.insert(key)
    for key in range(4):
        policy.remove(key)
    assert policy.remembered == 4
    policy.forget(3)
    assert list(policy.model.ghosts.by_key) == [3]
    policy.forget(3)
    assert policy.remembered == 0
    policy.check_integrity()


def prefix_hits(policy: EvictionPolicy[int], clock: Clock, *, seed: int, requests: int, capacity: int) -> int:
    hits = 0
    for request in itertools.islice(generate(seed=seed), requests):
        clock.now_s = request.timestamp_ms / 1000
        present = [block in policy for block in request.hash_ids]
        hits += present.index(False) if False in present else len(present)
        parent = None
        for block, is_present in zip(request.hash_ids, present, strict=True):
            if is_present:
                policy.touch(block)
        for block, is_present in zip(request.hash_ids, present, strict=True):
            if not is_present:
                if len(policy) == capacity:
                    victim = policy.victim()
                    assert victim is not None
                    policy.remove(victim)
                policy.insert(block, parent)
            parent = block
    policy.check_integrity()
    return hits


def overfill(policy: PrefixPolicy[str], clock: Clock, *, batch: int, pace_s: float, has_parents: bool, capacity: int = 1000) -> list[str]:
    """Store three times `capacity` blocks in batches, of which none is read, as the block table does it. Return the keys."""
    stored: list[str] = []
    for index in range(3 * capacity // batch):
        keys = words(f"{index}-", batch)
        policy.take_victims(len(policy) + batch - capacity, lambda key: True, lambda key: True)
        policy.insert_all(keys, [None, *keys[:-1]] if has_parents else None)
        stored += keys
        clock.now_s += pace_s
    policy.check_integrity()
    return stored


@pytest.mark.parametrize("has_parents", [False, True])
@pytest.mark.parametrize("pace_s", [0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 10.0])
@pytest.mark.parametrize("batch", [8, 64])
def test_blocks_that_were_never_read_leave_by_age(batch: int, pace_s: float, has_parents: bool) -> None:
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    stored = overfill(policy, clock, batch=batch, pace_s=pace_s, has_parents=has_parents)
    assert all(key in policy for key in stored[-900:])


def test_prompts_stay_until_a_decode_engine_reads_them() -> None:
    """A second later, when 400 blocks of 1,000 are newer; none is read again."""
    clock = Clock()
    policy: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for index in range(400):
        clock.now_s = index / 10
        policy.take_victims(len(policy) + 40 - 1000, lambda key: True, lambda key: True)
        keys = words(f"{index}-", 40)
        policy.insert_all(keys, [None, *keys[:-1]])
        if index >= 10:
            read = words(f"{index - 10}-", 40)
            assert all(key in policy for key in read)
            for key in read:
                policy.touch(key)


def test_on_conversations_it_hits_more_than_lru() -> None:
    clock = Clock()
    ours = prefix_hits(PrefixPolicy(clock=clock), clock, seed=11, requests=2500, capacity=2000)
    assert ours > 1.3 * prefix_hits(LRU(), clock, seed=11, requests=2500, capacity=2000)


class CountedStates(DictStates[int, Any]):
    """Counts the states that searches for blocks that are no leaves pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def scan(self, max_passed: int) -> Iterator[tuple[int, Any]]:
        for item in super().scan(max_passed):
            self.passed += 1
            yield item


def test_search_passes_few_blocks_of_large_policies() -> None:
    """A tenant's policies share their states: a small policy whose leaves are all in use is searched at each eviction."""
    states = CountedStates()
    model = PrefixModel[int](nodes=states, clock=ticking())
    large, leaves, chain = (PrefixPolicy(model) for _ in range(3))
    for key in range(10_000):
        large.insert(key)
    leaves.insert_all([10_001, 10_002, 10_003])
    for key in range(10_004, 10_014):
        chain.insert(key, key - 1 if key > 10_004 else None)
    large.insert(10_020)  # ends the visit under way
    assert leaves.victim(lambda key: False) is None
    assert states.passed == 0
    assert chain.victim(lambda key: False) is None
    assert states.passed == 9 * PASSED_PER_BLOCK
