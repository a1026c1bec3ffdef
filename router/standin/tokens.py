"""The tokens that stand-in engines make: each is a function of all tokens before it, as greedy decoding's are, and a small letter.

So the answer is a function of the prompt alone, whichever engines made it and wherever it was cut, and a test can foretell it.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

FIRST_LETTER: Final = ord("a")
LETTERS: Final = 26
_TOKEN: Final = struct.Struct("<i")


def continuation(tokens: Sequence[int]) -> Iterator[int]:
    """The tokens that follow `tokens`, without end. A token's id is the letter's code."""
    hasher = xxhash.xxh3_64(struct.pack(f"<{len(tokens)}i", *tokens))
    while True:
        token = FIRST_LETTER + hasher.intdigest() % LETTERS
        hasher.update(_TOKEN.pack(token))
        yield token


def text_of(tokens: Sequence[int]) -> str:
    """What the tokens of `continuation` spell."""
    return "".join(map(chr, tokens))
