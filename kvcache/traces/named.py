"""Traces as a command line names them: a file, or `generated:SEED:COUNT` for generated conversations."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvstore.kvcache.traces import mooncake
from kvstore.kvcache.traces.conversations import generate
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import InvalidArgument, TraceError

GENERATED: Final = "generated:"
FORM: Final = "generated:SEED:COUNT"


def read_requests(
    name: str, *, limit: int | None = None, read_file: Callable[[str], Iterator[TraceRequest]] = mooncake.read_trace
) -> Iterator[TraceRequest]:
    """Return the first `limit` requests of the trace `name`, all of them without a limit.

    `read_file` reads a trace that is a file. Raises InvalidArgument for a malformed `generated:`, TraceError for a file that does not
    exist, and during iteration whatever `read_file` raises.
    """
    if name.startswith(GENERATED):
        seed, count = _seed_and_count(name)
        return itertools.islice(generate(seed=seed), min(count, limit or count))
    _require_file(name)
    return itertools.islice(read_file(name), limit)


def count_requests(name: str, *, limit: int | None = None) -> int:
    """Return how many requests `read_requests(name, limit=limit)` yields, by the lines of a file. Raises as it does."""
    if name.startswith(GENERATED):
        count = _seed_and_count(name)[1]
    else:
        _require_file(name)
        count = mooncake.count_requests(name)
    return min(count, limit or count)


def _require_file(name: str) -> None:
    if not Path(name).exists():
        raise TraceError(f"cannot read the trace {name}: No such file or directory; {FORM} in its place generates so many requests")


def _seed_and_count(name: str) -> tuple[int, int]:
    seed, _, count = name.removeprefix(GENERATED).partition(":")
    if not seed.isdecimal() or not count.isdecimal() or not int(count):
        raise InvalidArgument(f"{name!r} is not of the form {FORM}, with two whole numbers and COUNT at least 1")
    return int(seed), int(count)
