"""S3-FIFO evicts as its three queues do when they are plain lists."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
from kvstore.tiers.policies.interface import ObservedCapacity
from kvstore.tiers.policies.s3fifo import S3FIFO


class NaiveS3FIFO(NaivePolicy):
    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.capacity = ObservedCapacity()
        self.named: int | None = None

    def insert(self, key: int) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0
        limit = int(0.9 * max(self.capacity.keys, len(self.uses)))
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - limit) :]

    def touch(self, key: int) -> None:
        self.uses[key] = min(3, self.uses[key] + 1)

    def remove(self, key: int) -> None:
        if key in self.small:
            self.small.remove(key)
            self.ghosts.append(key)
        else:
            self.main.remove(key)
        del self.uses[key]

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        capacity = self.capacity.observe(len(self.uses))
        if self.named in self.uses and self.named not in refused and self.uses[self.named] < (2 if self.named in self.small else 1):
            return self.named
        is_main_full = len(self.main) > capacity - int(0.1 * capacity)
        first, second = (self.of_main, self.of_small) if is_main_full else (self.of_small, self.of_main)
        self.named = first(refused)
        if self.named is None:
            self.named = second(refused)
        return self.named

    def of_small(self, refused: frozenset[int]) -> int | None:
        for key in list(self.small):
            if self.uses[key] >= 2:
                self.small.remove(key)
                self.main.append(key)
                self.uses[key] = 0
            elif key not in refused:
                return key
        return None

    def of_main(self, refused: frozenset[int]) -> int | None:
        for key in self.main * 4:
            if self.uses[key] >= 1:
                self.main.remove(key)
                self.main.append(key)
                self.uses[key] -= 1
                return self.of_main(refused)
            if key not in refused:
                return key
        return None


class TestS3FIFO(PolicyConformance):
    policy = S3FIFO
    naive = NaiveS3FIFO


TestS3FIFOAgainstNaive = against_naive(S3FIFO, NaiveS3FIFO)
