"""The heap finds what a scan for the lowest rank finds."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.rising_heap import SLACK, RisingHeap

KEYS = st.integers(0, 5)


class AgainstScan(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.heap: RisingHeap[int] = RisingHeap()
        self.ranks: dict[int, int] = {}
        self.clock = 0

    @rule(key=KEYS, rise=st.integers(0, 3))
    def use(self, key: int, rise: int) -> None:
        self.clock += 1
        rank = max(self.ranks.get(key, 0), rise << 32 | self.clock)
        (self.heap.raise_to if key in self.ranks else self.heap.add)(key, rank)
        self.ranks[key] = rank

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if key in self.ranks:
            self.heap.remove(key)
            del self.ranks[key]

    @rule(refused=st.frozensets(KEYS, max_size=3))
    def find(self, refused: frozenset[int]) -> None:
        lowest = min(self.ranks.keys() - refused, key=self.ranks.__getitem__, default=None)
        assert self.heap.lowest(lambda key: key not in refused, 10) == lowest
        if self.ranks:
            self.heap.lowest(lambda key: True, 10)
            assert self.heap.bound() == min(self.ranks.values())

    @invariant()
    def the_same_keys_are_present(self) -> None:
        self.heap.check_integrity()
        assert len(self.heap) == len(self.ranks)
        assert all((key in self.heap) == (key in self.ranks) for key in range(6))


TestAgainstScan = AgainstScan.TestCase
TestAgainstScan.settings = MACHINE_SETTINGS


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    heap: RisingHeap[str] = RisingHeap()
    heap.add("stays", 0)
    for rank in range(1, 10 * SLACK):
        for key in ("comes and goes", f"never seen again {rank}"):
            heap.add(key, 2 * rank + len(key) % 2)
            heap.remove(key)
            heap.check_integrity()
    assert len(heap._heap) <= 2 + SLACK
    assert heap.lowest(lambda key: True, 1) == "stays"
