"""Generated arguments of calls, as JSON that `child.py` executes."""

import random
from collections.abc import Callable
from typing import Any, Final

Json = Any
Call = dict[str, Json]
Arguments = Callable[[str], list[Json]]
"""Of a call, for a key."""
REGION_BYTES: Final = 1 << 16
REGISTERED: Final = 0
"""The region that groups register; regions 1 and 2 they leave alone, but for the group on registration."""
OTHER: Final = 1


def call(name: str, *arguments: Json, **named: Json) -> Call:
    return {"m": name, "a": list(arguments), "k": named}


def at(offset: int, region: int = REGISTERED) -> Json:
    return {"$at": [region, offset]}


class Material:
    """Keys, sizes and values, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prefix = ""
        self.made = 0

    def registered(self) -> Call:
        return call("register_buffer", at(0), REGION_BYTES)

    def key(self, name: str = "") -> str:
        if not name:
            self.made += 1
            name = f"k{self.made}"
        return self.prefix + name

    def size(self) -> int:
        return self.random.choice((1, 2, 7, 100, 255, 256, 4095, 4096, 10_000, self.random.randrange(1, 20_000)))

    def bytes(self, size: int | None = None) -> Json:
        return {"$bytes": [self.random.randrange(1000), self.size() if size is None else size]}

    def number(self, value: Json) -> Json:
        """An integer in one of the forms that callers have it in."""
        return self.random.choice((value, {"$numpy": [self.random.choice(("int64", "uint64")), value]}))

    def odd_number(self) -> Json:
        return self.random.choice((-1, 1.0, "1", None, True, 2**64, {"$numpy": ["float64", 1]}, [1], {"$numpy": ["int64", -1]}))

    def odd_lists(self) -> list[Json]:
        """For a list of two keys."""
        one, two = self.key(), self.key()
        return [
            *([one], [], [one, two, self.key()], one, "", None, {"$tuple": [one, two]}, {"$set": [one]}, {"$generator": [one, two]}),
            *([one, 1], [one, None], [one, {"$text": two}], {"$numpys": ["U20", [one, two]]}, {one: 1}, [[one], [two]], 5),
        ]
