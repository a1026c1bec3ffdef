"""The inputs that are kept, and what becomes of them when bytes are changed: an answer or a typed error.

Without a coverage-guided fuzzer, which `make fuzz` brings.
"""

import random
from collections.abc import Iterator

import pytest

from tests.fuzz import control_plane, corpus
from tests.fuzz.targets import TARGETS, check

CHANGED = 300
"""Changed inputs of each target."""


@pytest.fixture(autouse=True, scope="module")
def master() -> Iterator[None]:
    """The master of `control` ends with this file: its threads open descriptors, and later tests limit those of the
    process.
    """
    yield
    control_plane.close()


@pytest.mark.promise("input-untrusted")
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_is_answered_or_refused_by_a_typed_error(name: str) -> None:
    kept = corpus.read(name)
    assert kept, f"nothing is kept of {name}: make fuzz, with --keep"
    for data in kept:
        check(TARGETS[name], data)


@pytest.mark.promise("input-untrusted")
@pytest.mark.parametrize("name", TARGETS)
def test_so_is_what_is_changed(name: str) -> None:
    choice = random.Random(name)
    kept = corpus.read(name)
    for _ in range(CHANGED):
        data = bytearray(choice.choice(kept))
        for _change in range(choice.randint(1, 4)):
            at = choice.randint(0, len(data))
            data[at : at + choice.choice((0, 1, 4, 8))] = choice.randbytes(choice.choice((0, 1, 1, 4, 8)))
        check(TARGETS[name], bytes(data))
