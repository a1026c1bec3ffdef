"""GDSF evicts as a table of ranks does that is scanned for its minimum."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, PolicyMachine
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.gdsf import GDSF
from kvstore.tiers.policies.interface import EvictionPolicy


class NaiveGDSF(NaivePolicy):
    """For each key its rank, when it was used, and how often; `age` is the rank of what left last."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self.uses: dict[int, int] = {}
        self.age = 0
        self.clock = 0

    def insert(self, key: int) -> None:
        self.uses[key] = 0
        self.touch(key)

    def touch(self, key: int) -> None:
        self.clock += 1
        self.uses[key] += 1
        self.ranks[key] = (self.age + self.uses[key], self.clock)

    def remove(self, key: int) -> None:
        del self.uses[key]
        self.age = max(self.age, self.ranks.pop(key)[0])

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        return min(self.ranks.keys() - refused, key=lambda key: self.ranks[key], default=None)


class TestGDSF(PolicyConformance):
    policy = GDSF
    naive = NaiveGDSF


class GDSFAgainstNaive(PolicyMachine):
    """As long as only victims leave: other removals are tested below."""

    def make_policy(self) -> EvictionPolicy[int]:
        return GDSF()

    def make_naive(self) -> NaivePolicy:
        return NaiveGDSF()

    def remove(self, key: int) -> None:
        if self.policy.victim() == key:
            PolicyMachine.remove(self, key)


TestGDSFAgainstNaive = GDSFAgainstNaive.TestCase
TestGDSFAgainstNaive.settings = MACHINE_SETTINGS


def test_a_popular_key_that_is_deleted_makes_no_other_old() -> None:
    policy: GDSF[str] = GDSF()
    for key in "aaaaaaaabbc":
        policy.insert(key)
    policy.remove("a")
    policy.insert("d")
    assert policy.victim() == "c"
    policy.remove("c")
    assert policy.victim() == "b", "at the age of c that left, d ranks with b, which was used longer ago"
