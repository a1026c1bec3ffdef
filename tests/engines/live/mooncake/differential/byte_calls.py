"""Generated calls of objects as bytes: values, keys, removals, patterns, leases."""

from collections.abc import Iterable, Iterator
from typing import Final

from tests.engines.live.mooncake.differential.material import Arguments, Call, Json, Material, at, call

PATTERNS: Final = (
    *("^{p}", "{p}.*", "{p}a[0-9]+$", "{p}(a|b)1", "{p}[[:alpha:]]1", "{p}a[[:digit:]]$", "{p}[[:alnum:][:punct:]]+", "{p}[^[:alpha:]]"),
    *(r"{p}\w1", r"{p}\d", "{p}a{{1,2}}1", "^a1$", "nowhere", "(", "[", "*", "{p}[z-a]", "{p}(?=a)a1", "{p}(?!a).1"),
    *("(?i){p}A1", "{p}(?<=/)a1", "{p}(?P<n>a)1", "[[:bad:]]", "{p}[[:upper:]]", "a{{2,1}}", "{p}\\", "{p}a1\\b", "{p}.1", "{p}$"),
    *("{p}[a-", ")", "{p}a)", "{{", "{p}a{{", "}}", r"{p}\8", r"{p}[\d]", r"{p}[\w-]1", "{p}[a\\]1", "(?:{p})a", "(?#x){p}", "(?:", "+"),
    "(?x){p}",
)
RARE: Final = (
    *("{p}a**", r"{p}(a)(b)?\1", "{p}[[.a.]]", "{p}[[=a=]]", r"{p}\u0061", "{p}a++", "{p}[^]a]1", r"{p}\x61", r"{p}\cA", r"{p}\Qa"),
)


class ByteCalls(Material):
    """A group of calls a method."""

    def values(self) -> Iterator[Call]:
        """Bytes in every form."""
        forms = [
            *(self.bytes(), {"$bytearray": [1, self.size()]}, {"$view": [2, self.size()]}, {"$array": ["uint8", [3, 4]]}),
            *(self.bytes(0), "text", None, 5, [1, 2], {"$tensor": ["uint8", [5]]}),
        ]
        keys = [self.key() for _ in forms]
        for key, form in zip(keys, forms, strict=True):
            yield call(self.random.choice(("put", "upsert")), key, form)
            yield call("get", key)
            yield call("get_size", key)
        yield call("put", keys[0], self.bytes())
        yield call("get", keys[0])
        for name in ("get_batch", "batch_get_buffer", "batch_is_exist"):
            yield call(name, keys)
        yield call("get_buffer", keys[0])
        yield call("get_buffer", self.key())
        yield call("put_parts", self.key("parts"), self.bytes(3), self.bytes(0), {"$bytearray": [5, 9]})
        yield call("get", self.key("parts"))
        for parts in ([], [self.bytes(0)], [{"$array": ["float32", [3]]}], [{"$array": ["uint8", [2, 2]]}], ["text"], [None]):
            yield call("put_parts", self.key(), *parts)
            yield call("upsert_parts", self.key(), *parts)
        yield call("put_parts", self.key(), config={"$config": {}})
        yield call("put_batch", [self.key(), self.key()], [self.bytes(), self.bytes()])
        yield call("put_batch", [self.key(), self.key()], [self.bytes(), self.bytes(0)])
        yield call("put_batch", [self.key(), self.key()], [self.bytes()])
        yield call("put_batch", [], [])
        yield call("upsert_batch", [], [])
        for lists in self.odd_lists():
            if lists != []:
                yield call("get_batch", lists)
            yield call(self.random.choice(("put_batch", "upsert_batch")), lists, [self.bytes(), self.bytes()])
            yield call("batch_is_exist", lists)
            yield call("batch_get_buffer", lists)

    def keys(self) -> Iterator[Call]:
        """Names of objects."""
        odd: list[Json] = [
            "",
            "é" * 50,
            "\0",
            "a\0b",
            "x" * 300,
            "y" * 5000,
            " ",
            "/",
            {"$text": "bytes"},
            5,
            None,
            ["list"],
            "\ud800",
            {"$numpys": ["U3", "abc"]},
        ]
        for name in odd:
            key = self.prefix + name if isinstance(name, str) and name else name
            for method, arguments in (
                ("put", [key, self.bytes(5)]),
                ("is_exist", [key]),
                ("get", [key]),
                ("get_size", [key]),
                ("get_into", [key, at(0), 100]),
                ("get_buffer", [key]),
                ("get_replica_desc", [key]),
                ("remove", [key, True]),
                ("is_exist", [key]),
            ):
                yield call(method, *arguments)

    def upserts(self) -> Iterator[Call]:
        """In place of what is there, of another size or the same."""
        key = self.key()
        for size in (100, 100, 50, 200):
            yield call("upsert", key, self.bytes(size))
            yield call("get", key)
        yield call("upsert_from", key, at(0), 77)
        yield call("get", key)
        yield call("upsert_parts", key, self.bytes(5), self.bytes(6))
        yield call("upsert_batch", [key, self.key()], [self.bytes(8), self.bytes(9)])
        yield call("get", key)
        yield call("upsert_batch", [self.key("same"), self.key("same")], [self.bytes(8), self.bytes(9)])
        yield call("get_size", self.key("same"))
        yield call("upsert", key, self.bytes(0))
        yield call("get", key)

    def removals(self) -> Iterator[Call]:
        """One key, several, all with a prefix; what is there again."""
        keys = [self.key() for _ in range(6)]
        yield call("put_batch", keys, [self.bytes() for _ in keys])
        yield call("remove", keys[0])
        yield call("remove", keys[0])
        yield call("is_exist", keys[0])
        yield call("put", keys[0], self.bytes())
        yield call("get", keys[0])
        yield call("batch_remove", [keys[1], self.key(), keys[1]])
        yield call("remove", keys[2], force=True)
        yield call("remove", keys[2], {"$numpy": ["bool_", 1]})
        yield call("remove", keys[3], 1)
        yield call("remove", keys[3], None)
        yield call("remove", keys[3], "yes")
        yield call("batch_remove", [])
        for lists in self.odd_lists():
            yield call("batch_remove", lists)
        yield call("batch_remove", keys, True)
        yield call("batch_is_exist", keys)

    def patterns(self) -> Iterator[Call]:
        """Patterns, each on the same keys."""
        yield from self.removed_by(PATTERNS)
        yield call("remove_by_regex", "^" + self.prefix, force=True)
        yield call("remove_by_regex", 5)
        yield call("remove_by_regex", None)
        yield call("remove_by_regex", {"$text": "^" + self.prefix})

    def rare_patterns(self) -> Iterator[Call]:
        yield from self.removed_by(RARE)

    def removed_by(self, patterns: Iterable[str]) -> Iterator[Call]:
        keys = [self.key(name) for name in ("a1", "a22", "b1", "aa1", "Ab_", "é1")]
        for pattern in patterns:
            yield call("put_batch", keys, [{"$bytes": [1, 4]}] * len(keys))
            yield call("remove_by_regex", pattern.format(p=self.prefix), True)

    def leases(self) -> Iterator[Call]:
        """Yield removals of objects that an earlier call leased."""
        looks: list[tuple[str, Arguments]] = [
            ("is_exist", lambda key: [key]),
            ("batch_is_exist", lambda key: [[key]]),
            ("put", lambda key: [key, {"$bytes": [3, 9]}]),
        ]
        for name, arguments in looks:
            yield from self.removed_after(name, arguments)

    def removed_after(self, name: str, arguments: Arguments) -> Iterator[Call]:
        key = self.key()
        yield call("put", key, {"$bytes": [2, 50]})
        yield call(name, *arguments(key))
        yield call("remove", key)
        yield call("batch_remove", [key])
        yield call("remove_by_regex", f"^{key}$")
        yield call("upsert", key, {"$bytes": [4, 60]})
        yield call("remove", key, True)
        yield call("remove", key)

    def replicas(self) -> Iterator[Call]:
        """Yield calls that return the replicas of objects."""
        key = self.key()
        yield call("put", key, self.bytes())
        yield call("get_replica_desc", key)
        yield call("get_replica_desc", self.key("none"))
        yield call("batch_get_replica_desc", [key, self.key("none")])
        yield call("batch_get_replica_desc", [])
        yield call("batch_get_replica_desc", key)
        yield call("get_replica_desc", 5)
        yield call("health_check")
