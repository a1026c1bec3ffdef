"""Eviction policy for KV blocks in prefix trees: evicts the block whose slot is expected to earn the fewest hits per
second.

It knows the tree of prefixes by the parents passed to `insert`.

- Only leaves are evicted: a block without its parent cannot be used. A prompt shrinks from its end.
- A block's worth depends on the class of its visit (visits.py): a shared prefix, a first prompt, or a later turn of a
  conversation, and its length.
- The policy learns the reuse of each class by age online, from evicted blocks too (reuse_hazard.py).
- Leaves are evicted in the order of their worth (cohort_order.py).
- The last block of a prompt is discounted by the measured reuse of such blocks. If a prompt's unfinished block has a
  key of its own, it is never read again.
- Hints of a caller scale the worth of its blocks, or replace it by the expected time of the next read, as far as
  earlier hints came true (block_hints.py).
- The policies of a tenant share one model of all this (model.py).
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

from kvstore.tiers.policies.interface import EvictionPolicy, K, PolicyFamily, States
from kvstore.tiers.policies.prefix.integrity import check_model
from kvstore.tiers.policies.prefix.model import PrefixModel
from kvstore.tiers.policies.prefix.visits import VisitRun
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics

ONLY_TIER: Final = 1
"""Tier of a policy without others beside it."""


class PrefixFamily(PolicyFamily[K]):
    """The `prefix` policies of one tenant. `clock` gives monotonic seconds; only differences matter."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._model: PrefixModel[K] = PrefixModel(clock=clock)

    def use_states(self, states: States[K, Any]) -> None:
        self._model = PrefixModel(nodes=states, clock=self._clock)

    def policy(self, tier: int) -> "PrefixPolicy[K]":
        return PrefixPolicy(self._model, tier)

    def reuse_statistics(self) -> ReuseStatistics:
        return self._model.estimate.reuse_statistics()

    def use_statistics_of_others(self, statistics: ReuseStatistics) -> None:
        self._model.estimate.use_statistics_of_others(statistics)


class PrefixPolicy(EvictionPolicy[K]):
    """Prefix-tree policy of one slot group in one tier.

    Operations are O(1) amortised, except a search through at most `max_scan` keys when leaves are refused.
    """

    name = "prefix"
    has_pure_victim = True

    def __init__(self, model: PrefixModel[K] | None = None, tier: int = ONLY_TIER, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a `model` it has its own, with this `clock`."""
        self.model: PrefixModel[K] = model if model is not None else PrefixModel(clock=clock)
        self._places = self.model.open(tier)
        self._place = self._places[0]
        self._order = self._place.order

    def insert(self, key: K, parent: K | None = None) -> None:
        self.model.insert(key, parent, self._places)

    def insert_all(self, keys: Sequence[K], parents: Sequence[K | None] | None = None) -> None:
        if parents is not None or len(keys) < 3 or not self.model.insert_alone(keys, self._places):
            super().insert_all(keys, parents)

    def touch(self, key: K) -> None:
        self.model.touch(key, self._place)

    def remove(self, key: K) -> None:
        self.model.remove(key, self._place)

    def release(self, key: K) -> None:
        self.model.release(key, self._place)

    def set_priority(self, key: K, priority: int) -> None:
        self.model.set_priority(key, priority)

    def expect_reuse(self, key: K, after_s: float) -> None:
        self.model.expect_reuse(key, after_s, self._place)

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        first = self._order.first()
        if first is not None and evictable(first):
            return first
        order = self.model.eviction_order(self._place)
        return next(filter(evictable, islice(order, first is not None, self.max_scan)), None)

    def take_victims(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        found: list[K] = []
        while len(found) < count:
            more = self._take_alone(count - len(found), evictable, may_evict) or super().take_victims(1, evictable, may_evict)
            if not more:
                break
            found += more
        return found

    def _take_alone(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        """Return the next victims as far as they belong to one run of blocks stored alone, of which only ghosts remain.

        Empty if the first victim belongs to no run, or may not be evicted.
        """
        first = self._order.first()
        run = self.model.nodes[first] if first is not None else None
        if not isinstance(run, VisitRun):
            return []
        found = list[K]()
        for key in islice(run, count):
            if not (evictable(key) and may_evict(key)):
                break
            found.append(key)
        if found:
            self.model.remove_alone(found, run)
        return found

    def next_after(self, key: K) -> K | None:
        return self.model.next_after(key, self._place)

    def worth(self, key: K) -> float | None:
        return self.model.worth(key, self._place)

    @property
    def remembered(self) -> int:
        """Ghosts of all policies of the family."""
        return len(self.model.ghosts)

    def forget(self, count: int) -> None:
        self.model.ghosts.forget(count)

    def close(self) -> int:
        return len(self.model.ghosts) if self.model.places.close(self._place) else 0

    def __len__(self) -> int:
        return self._place.count

    def __contains__(self, key: K) -> bool:
        node = self.model.nodes.get(key)
        return node is not None and self._place in node.places

    def check_integrity(self) -> None:
        check_model(self.model)
