"""A fixed text made from seeds, in which the right next byte often depends on one far back: it must be looked up in the KV cache.

A story names people with their homes and possessions, and then repeats the facts in other words and another order. Bytes are tokens.
"""

import random
from typing import Final

NAMES: Final = ("Ada", "Boris", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas")
TRADES: Final = ("baker", "miller", "weaver", "potter", "cooper", "sailor", "mason", "tanner")
TOWNS: Final = ("Avon", "Brook", "Cliff", "Dale", "Ely", "Ford", "Grove", "Hill")
ANIMALS: Final = ("geese", "goats", "hens", "mules", "sheep", "bees", "cats", "doves")


def story(rng: random.Random) -> tuple[str, str]:
    """Three facts, some 120 bytes, and the same facts again, some 140."""
    facts = list(zip(rng.sample(NAMES, 3), rng.sample(TRADES, 3), rng.sample(TOWNS, 3), rng.sample(ANIMALS, 3), strict=True))
    told = " ".join(f"{name} the {trade} of {town} keeps {animals}." for name, trade, town, animals in facts)
    rng.shuffle(facts)
    return told, " ".join(f"{name} is a {trade} and lives in {town} with {animals}." for name, trade, town, animals in facts)


def stories(count: int, *, seed: int) -> list[int]:
    """The first `count` tokens of the stories of a seed."""
    rng, text = random.Random(f"stories {seed}"), ""
    while len(text) < count:
        text += "{} {}\n".format(*story(rng))
    return list(text[:count].encode())


def half_told(seed: int, *, context_tokens: int) -> tuple[list[int], list[int]]:
    """So many tokens that end where a story has told its facts, and the rest of that story."""
    rng = random.Random(f"half told {seed}")
    told, again = story(rng)
    before = bytes(stories(context_tokens, seed=seed)).decode()
    return list(f"{before}\n{told} ".encode())[-context_tokens:], list(f"{again}\n".encode())
