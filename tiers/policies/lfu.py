"""LFU: evicts the key with the fewest reads; among equals, the one that has had that count for longest.

Counts do not age: a key that was once popular stays. Suits stable popularity, such as system prompts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.tiers.policies.interface import EvictionPolicy, K


class _Bucket(OrderedDict[K, None]):
    """The keys of one count, in order of arrival, linked to the buckets of the next lower and higher count."""

    __slots__ = ("count", "higher", "lower")

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.lower: _Bucket[K] = self
        self.higher: _Bucket[K] = self


class LFU(EvictionPolicy[K]):
    """A ring of non-empty buckets by count.

    Source: Shah, Mitra, Matani, An O(1) algorithm for implementing the LFU cache eviction scheme, 2010.
    """

    name = "lfu"
    has_pure_victim = True

    def __init__(self) -> None:
        self._bucket_of: dict[K, _Bucket[K]] = {}
        self._keys = self._bucket_of
        # The ring's two ends: no key ever has count 0, so this bucket is below the lowest and above the highest.
        self._end: _Bucket[K] = _Bucket(0)

    def insert(self, key: K, parent: K | None = None) -> None:
        self._raise(key, self._bucket_of.get(key, self._end))

    def touch(self, key: K) -> None:
        bucket = self._bucket_of.get(key)
        if bucket is not None:
            self._raise(key, bucket)

    def remove(self, key: K) -> None:
        bucket = self._bucket_of.pop(key, None)
        if bucket is not None:
            self._take_out(key, bucket)

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        return next(filter(evictable, islice(self._ascending(), self.max_scan)), None)

    def check_integrity(self) -> None:
        assert not self._end
        assert sum(map(len, self._buckets())) == len(self._bucket_of)
        for bucket in self._buckets():
            assert bucket, f"the bucket of count {bucket.count} is empty"
            assert bucket.higher is self._end or bucket.count < bucket.higher.count
            assert bucket.higher.lower is bucket
            assert all(self._bucket_of[key] is bucket for key in bucket)

    def _buckets(self) -> Iterator[_Bucket[K]]:
        bucket = self._end.higher
        while bucket is not self._end:
            yield bucket
            bucket = bucket.higher

    def _ascending(self) -> Iterator[K]:
        for bucket in self._buckets():
            yield from bucket

    def _raise(self, key: K, bucket: _Bucket[K]) -> None:
        """Move the key one count up; `bucket` is the end for a new key."""
        above = bucket.higher
        if above is self._end or above.count != bucket.count + 1:
            above = _Bucket(bucket.count + 1)
            above.lower, above.higher = bucket, bucket.higher
            above.lower.higher = above.higher.lower = above
        above[key] = None
        self._bucket_of[key] = above
        if bucket is not self._end:
            self._take_out(key, bucket)

    def _take_out(self, key: K, bucket: _Bucket[K]) -> None:
        del bucket[key]
        if not bucket:
            bucket.lower.higher, bucket.higher.lower = bucket.higher, bucket.lower
