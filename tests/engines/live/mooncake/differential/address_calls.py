"""Generated calls of memory by its address."""

from collections.abc import Iterator
from typing import Final

from tests.engines.live.mooncake.differential.material import OTHER, REGION_BYTES, Call, Material, at, call

NUMPY: Final = ("int64", "uint64", "int32", "uint32", "int16", "intp")


class AddressCalls(Material):
    """A group of calls a method."""

    def addresses(self) -> Iterator[Call]:
        """Pointers and sizes of one object."""
        for _ in range(6):
            key, size, offset = self.key(), self.size(), self.random.randrange(0, 30_000)
            yield call(self.random.choice(("put_from", "upsert_from")), key, self.number(at(offset)), self.number(size))
            yield call(
                "get_into", key, self.number(at(self.random.randrange(32_000))), self.number(size + self.random.choice((0, 0, 1, 100)))
            )
            yield call("get_into", key, at(0), max(size - 1, 0))
            yield call("get_into", key, at(7, OTHER), size)
            yield call("put_from", self.key(), at(offset, OTHER), size)
            yield call("get", key)
        key = self.key()
        yield call("put_from", key, at(10), 100)
        for kind in NUMPY:
            pointer = {"$numpy": [kind, at(0)]} if kind in ("int64", "uint64", "intp") else at(0)
            yield call("put_from", self.key(), pointer, {"$numpy": [kind, 10]})
            yield call("get_into", key, at(0), {"$numpy": [kind, 200]})
        for odd in [self.odd_number() for _ in range(4)] + [0]:
            yield call("put_from", self.key(), at(0), odd)
            yield call("get_into", key, at(0), odd)
        yield call("upsert_from", self.key("empty"), at(0), 0)
        yield call("is_exist", self.key("empty"))
        for odd in (-1, 1.5, "1", None, 2**64):
            yield call("put_from", self.key(), odd, 10)
            yield call("get_into", key, odd, 100)
            yield call("get_into", self.key(), odd, 100)
            yield call("upsert_from", self.key(), odd, 10)
        yield call("put_from", self.key(), at(REGION_BYTES - 5), 10)
        yield call("get_into", key, at(REGION_BYTES - 5), 100)
        yield call("put_from_with_metadata", self.key("meta"), at(0), at(500), 100, 10)
        yield call("get", self.key("meta"))
        for size, metadata in ((0, 10), (10, 0), (0, 0), (-1, 5)):
            yield call("put_from_with_metadata", self.key(), at(0), at(500), size, metadata)

    def batches(self) -> Iterator[Call]:
        """Lists of pointers and sizes."""
        for name in ("batch_put_from", "batch_upsert_from"):
            yield call(name, [self.key(), "", self.key()], [at(0)] * 3, [5] * 3)
            yield call(name, [self.key()], [at(0)], [0])
            keys, sizes = [self.key() for _ in range(3)], [self.size() for _ in range(3)]
            places = [at(0), at(20_000), at(40_000)]
            yield call(name, keys, places, sizes)
            yield call("batch_get_into", [*keys, self.key()], [at(5), at(20_005), at(40_005), at(0)], [*sizes, 10])
            yield call("batch_get_into", keys, places, [max(size - 1, 0) for size in sizes])
            yield call(name, [self.key() for _ in keys], {"$numpys": ["uint64", places]}, {"$numpys": ["int64", sizes]})
            yield call("batch_get_into", keys, {"$numpys": ["int64", places]}, {"$numpys": ["uint64", [30_000] * 3]})
            yield call(name, [self.key() for _ in keys], [at(0), at(50), at(100)], [5, 0, 5])
            yield call(name, [self.key() for _ in keys], [at(0), at(50), at(100)], [5, -1, 5])
            for lists in self.odd_lists():
                yield call(name, lists, [at(0), at(20)], [10, 10])
                yield call("batch_get_into", lists, [at(0), at(20)], [10, 10])
            for odd in (
                [at(0)],
                at(0),
                "ab",
                None,
                {"$tuple": [at(0), at(1)]},
                [at(0), "1"],
                [at(0), 1.5],
                {"$set": [at(0)]},
                [[at(0)], [at(1)]],
                [],
            ):
                yield call(name, [self.key(), self.key()], odd, [10, 10])
                yield call("batch_get_into", [keys[0], self.key()], odd, [20_000, 10])
            for odd in ([10], 10, "10", None, {"$tuple": [10, 10]}, [10, None], [10, 2.5], []):
                yield call(name, [self.key(), self.key()], [at(0), at(1)], odd)
                yield call("batch_get_into", [keys[0], self.key()], [at(0), at(1)], odd)

    def parts(self) -> Iterator[Call]:
        """Objects in several places."""
        one, two = self.key(), self.key()
        yield call("batch_put_from_multi_buffers", [one, two], [[at(0), at(1000)], [at(500)]], [[100, 50], [20]])
        yield call("get_batch", [one, two])
        yield call("batch_get_into_multi_buffers", [one, two, self.key()], [[at(10), at(3000)], [at(600)], [at(0)]], [[70, 80], [20], [5]])
        yield call("batch_get_into_multi_buffers", [one], [[at(10), at(3000)]], [[70, 70]])
        yield call("batch_get_into_multi_buffers", [one], [[at(10), at(500)]], [[150, 0]])
        yield call("batch_get_into_multi_buffers", [one], [{"$numpys": ["uint64", [at(10), at(3000)]]}], [{"$numpys": ["int32", [70, 80]]}])
        for pointers, sizes in (
            *(([[at(0)]], [[5, 5]]), ([[at(0), at(1)]], [[5]]), ([], []), ([[]], [[]]), ([[at(0)]], [[0]]), ([at(0)], [5])),
            *(([[at(0)], [at(1)]], [[5]]), ([[at(0)]], [[5], [5]]), ("ab", "ab"), (None, None), ([None], [[5]])),
            *(
                ([[at(0), at(9)]], [[5, 0]]),
                ({"$tuple": [{"$tuple": [at(0)]}]}, {"$tuple": [{"$tuple": [5]}]}),
                ([["1"]], [[5]]),
                ([[at(0)]], [[-1]]),
            ),
        ):
            yield call("batch_put_from_multi_buffers", [self.key()], pointers, sizes)
            yield call("batch_get_into_multi_buffers", [one], pointers, sizes)
        yield call("batch_put_from_multi_buffers", [self.key(), ""], [[at(0)], [at(0)]], [[5], [5]])
        yield call("batch_put_from_multi_buffers", [], [], [])
        yield call("batch_get_into_multi_buffers", [], [], [])
        yield call("batch_put_from_multi_buffers", [self.key(), self.key()], [[at(0)], [at(0), at(1)]], [[5], [5]])

    def ranges(self) -> Iterator[Call]:
        """Ranges of objects to offsets of buffers."""
        one, two, small = self.key(), self.key(), self.key()
        yield call("put", one, self.bytes(1000))
        yield call("put", two, self.bytes(500))
        yield call("put", small, self.bytes(1))
        ranged = "get_into_ranges"
        yield call(ranged, [at(0)], [[one, two]], [[[0, 100], [200]]], [[[5, 900], [0]]], [[[50, 100], [500]]])
        for _ in range(4):
            base, to, of, size = (self.random.randrange(n) for n in (50_000, 5000, 900, 99))
            yield call(ranged, [self.number(at(base))], [[one]], [[[to]]], [[[of]]], [[[size]]])
        yield call(ranged, [at(100), at(60_000)], [[one], [two]], [[[0]], [[0]]], [[[0]], [[0]]], [[[10]], [[10]]])
        yield call(ranged, [at(REGION_BYTES - 10)], [[one, one]], [[[0], [0]]], [[[0], [0]]], [[[10], [11]]])
        yield call(ranged, [at(0, OTHER)], [[one]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one, self.key(), two]], [[[0], [0], [0]]], [[[0], [0], [0]]], [[[10], [10], [10]]])
        yield call(ranged, [at(0)], [[one, one]], [[[0], [0]]], [[[995], [1000]]], [[[10], [1]]])
        yield call(ranged, [at(0)], [[one]], [[[0, 500]]], [[[0, 999]]], [[[10, 2]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [[[0]]], [[[0]]])
        yield call(ranged, [at(0)], [[one]], [[[]]], [[[]]], [[[]]])
        yield call(ranged, [at(0)], [[]], [[]], [[]], [[]])
        yield call(ranged, [], [], [], [], [])
        yield call(ranged, [at(0)], [[one]], [[[0, 1]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [[[0, 2]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [[[0]]], [[]])
        yield call(ranged, [at(0)], [[one, two]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one], [two]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0), at(0)], [[one]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [], [[[10]]])
        yield call(ranged, [0], [[one]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [one], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[-1]]], [[[0]]], [[[10]]])
        yield call(
            ranged,
            [at(0)],
            [[one]],
            [[{"$numpys": ["int64", [0, 50]]}]],
            [[{"$numpys": ["int64", [0, 1]]}]],
            [[{"$numpys": ["uint32", [9, 9]]}]],
        )
        yield call(ranged, at(0), [[one]], [[[0]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[2**63]]], [[[0]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [[[2**63]]], [[[10]]])
        yield call(ranged, [at(0)], [[one]], [[[0]]], [[[0]]], [[[2**63]]])

    def registrations(self) -> Iterator[Call]:
        """Memory that is made known, and given up."""
        yield call("register_buffer", at(0, OTHER), 1000)
        yield call("put_from", self.key("r"), at(0, OTHER), 1000)
        yield call("get_into", self.key("r"), at(0, OTHER), 1000)
        yield call("register_buffer", at(0, OTHER), 1000)
        yield call("register_buffer", at(100, OTHER), 100)
        yield call("register_buffer", at(500, OTHER), 5000)
        yield call("unregister_buffer", at(0, OTHER))
        yield call("unregister_buffer", at(100, OTHER))
        yield call("unregister_buffer", at(500, OTHER))
        yield call("unregister_buffer", at(0, OTHER))
        yield call("unregister_buffer", at(12, OTHER))
        yield call("register_buffer", {"$numpy": ["uint64", at(0, OTHER)]}, {"$numpy": ["int32", 4096]})
        yield call("unregister_buffer", {"$numpy": ["int64", at(0, OTHER)]})
        for pointer, size in ((0, 10), (at(0, OTHER), 0), (at(0, OTHER), -1), (-1, 10), ("1", 10), (None, 10), (at(0, OTHER), 1.5), (0, 0)):
            yield call("register_buffer", pointer, size)
        for pointer in (0, -1, "1", None, 1.5):
            yield call("unregister_buffer", pointer)
        yield call("unregister_buffer", at(0))
        yield call("put_from", self.key(), at(0), 10)
        yield call("get_into", self.key("r"), at(0), 1000)
        yield self.registered()
        yield call("unregister_buffer", at(0))
        yield self.registered()
