"""Reader of the public Mooncake trace format: one JSON object per line, {timestamp, input_length, output_length,
hash_ids}.

Strict: a malformed line raises an error that names it, because a replay of a partial trace would report a meaningless
hit ratio. Unknown members are ignored, because later traces add some.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.protocol.errors import TraceError

MAX_LINE_BYTES: Final = 16 << 20
"""A request of a million tokens has 40 KB: a longer line is another kind of file."""
MAX_ID: Final = (1 << 64) - 1
MAX_TIMESTAMP_MS: Final = 1e15
"""30,000 years: larger values are not milliseconds."""
MAX_TOKENS: Final = 1 << 40
MAX_SHOWN: Final = 40
"""Characters of a value in an error text."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt. `hash_ids` identify its 512-token blocks in order; equal ids are equal prefixes. Lengths are in
    tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """Yield the requests of a file, line by line. Raises TraceError: the file cannot be read, or a line, which the
    text names, is malformed."""
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                try:
                    yield parse_request(line)
                except TraceError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from None


def count_requests(path: str | Path) -> int:
    """Return the number of lines, as the length of a replay. Raises TraceError: the file cannot be read."""
    try:
        with open(path, "rb") as file:
            count, last = 0, b"\n"
            while part := file.read(1 << 20):
                count, last = count + part.count(b"\n"), part
            return count + (not last.endswith(b"\n"))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from None


def parse_object(line: bytes, *, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """Parse one line of JSON. Raises TraceError, without the line's number, unless it is a JSON object."""
    if len(line) > max_bytes:
        raise TraceError(f"longer than {max_bytes} bytes")
    try:
        found = json.loads(line)
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON, or cut off: {error}") from None
    if not isinstance(found, dict):
        raise TraceError("not a JSON object")
    return found


def parse_request(line: bytes) -> TraceRequest:
    """Parse one line as a request. Raises TraceError, without the line's number."""
    found = parse_object(line)
    timestamp_ms = _member(found, "timestamp")
    if type(timestamp_ms) not in (int, float) or not 0 <= timestamp_ms <= MAX_TIMESTAMP_MS:
        raise TraceError(f"timestamp is {_shown(timestamp_ms)}, not a number of milliseconds")
    hash_ids = _member(found, "hash_ids")
    if type(hash_ids) is not list or not all(type(block) is int and 0 <= block <= MAX_ID for block in hash_ids):
        raise TraceError("hash_ids is not a list of whole numbers from 0 to 2^64 - 1")
    return TraceRequest(timestamp_ms, _length(found, "input_length"), _length(found, "output_length"), tuple(hash_ids))


def _member(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise TraceError(f"no {name}")
    return found[name]


def _length(found: dict[str, Any], name: str) -> int:
    value = _member(found, name)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise TraceError(f"{name} is {_shown(value)}, not a number of tokens")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
