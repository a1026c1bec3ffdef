"""ARC evicts as its four lists do when they are plain lists."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
from kvstore.tiers.policies.arc import ARC
from kvstore.tiers.policies.interface import ObservedCapacity


class NaiveARC(NaivePolicy):
    """The names of the paper; lists from the oldest to the newest."""

    def __init__(self) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0
        self.capacity = ObservedCapacity()

    def insert(self, key: int) -> None:
        c = max(self.capacity.keys, len(self.t1 + self.t2) + 1)
        if key in self.b1:
            self.p = min(c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        while self.b1 and len(self.t1 + self.b1) > c:
            self.b1.pop(0)
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * c:
            self.b2.pop(0)

    def touch(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def remove(self, key: int) -> None:
        resident, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
        resident.remove(key)
        ghosts.append(key)

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        count = len(self.t1 + self.t2)
        newcomers = self.capacity.observe(count) - count
        order = self.t1 + self.t2 if len(self.t1) + newcomers > self.p else self.t2 + self.t1
        return next((key for key in order if key not in refused), None)


class TestARC(PolicyConformance):
    policy = ARC
    naive = NaiveARC


TestARCAgainstNaive = against_naive(ARC, NaiveARC)
