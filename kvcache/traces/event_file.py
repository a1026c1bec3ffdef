"""File format of a recording of a cluster's block events: one JSON object per line. kv_events.py interprets the events.

The first line is HEADER. Each other line is an event:

    {"event": "stored" | "read" | "removed", "timestamp", "node", "tenant", "keys", "parents", "sizes"}
    {"event": "gap", "timestamp", "node", "tenant", "lost"}

The first form is a batch of blocks of one node. A gap means that the events of `lost` blocks are missing, or an unknown
number (null). `timestamp` is the node's wall clock in milliseconds since 1970; keys and parents are hexadecimal, "" is
no parent; sizes are in bytes. Lines of one node are in order; lines of several nodes are not ordered by time.

The reader rejects malformed lines like the trace reader: a partial recording would yield wrong prompts.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.kvcache.traces.mooncake import parse_object
from kvstore.protocol.errors import Broken, InvalidArgument, TraceError

STORED: Final = "stored"
READ: Final = "read"
REMOVED: Final = "removed"
GAP: Final = "gap"
HEADER: Final = {"format": "kvstore events", "version": 1}
MAX_LINE_BYTES: Final = 96 << 20
"""65,536 blocks with keys and parents of 255 bytes take 72 MB: a longer line is another kind of file."""
MAX_KEY_BYTES: Final = 255
MAX_TIMESTAMP_MS: Final = 1e15
"""In the year 33658."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Event of several blocks at once, in order. `kind` is STORED, READ or REMOVED; a parent b"" is none."""

    kind: str
    timestamp_ms: float
    node: str
    tenant: str
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    sizes_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class LostEvents:
    """Events of `lost` blocks are missing before this time; None: unknown number."""

    timestamp_ms: float
    node: str
    tenant: str
    lost: int | None


class EventWriter:
    """Writes a recording. The file always ends with a whole line, even if the process is killed between writes. A
    context manager."""

    def __init__(self, path: str | Path) -> None:
        """Create or truncate the file. Raises InvalidArgument: it cannot be created; and as `write`."""
        self._path = path
        try:
            open(path, "wb").close()
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error.strerror or error}") from None
        self._whole_bytes = 0
        try:
            self._append([HEADER])
        except BaseException:
            self.close()
            raise

    def write(self, events: Sequence[BlockEvent | LostEvents]) -> None:
        """Append all events. Raises Broken on a write error, such as a full disk; the file still ends with a whole
        line."""
        self._append([_as_dict(event) for event in events])

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        data = memoryview(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))
        whole_bytes = self._whole_bytes + len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise Broken(f"cannot write {self._path}: {error.strerror or error}") from None
        else:
            self._whole_bytes = whole_bytes
        finally:
            if self._whole_bytes != whole_bytes and os.path.isfile(self._path):
                self._file.truncate(self._whole_bytes)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_recording(path: str | Path) -> bool:
    """Return whether the first line is a recording's header, of any version. Raises TraceError: the file cannot be
    read."""
    try:
        with open(path, "rb") as file:
            first = json.loads(file.readline(1 << 10))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("format") == HEADER["format"]


def read_events(path: str | Path) -> Iterator[BlockEvent | LostEvents]:
    """Yield the events in the order of the file. Raises TraceError: the file cannot be read, or a line, which the
    text names, is malformed."""
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                try:
                    found = parse_object(line, max_bytes=MAX_LINE_BYTES)
                    if number > 1:
                        yield _event(found)
                    elif found != HEADER:
                        raise TraceError(f"not the header of a recording of this release, {json.dumps(HEADER)}")
                except TraceError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise TraceError(f"cannot read the recording {path}: {error.strerror or error}") from None


def _as_dict(event: BlockEvent | LostEvents) -> dict[str, Any]:
    if isinstance(event, LostEvents):
        return {"event": GAP, "timestamp": event.timestamp_ms, "node": event.node, "tenant": event.tenant, "lost": event.lost}
    return {
        "event": event.kind,
        "timestamp": event.timestamp_ms,
        "node": event.node,
        "tenant": event.tenant,
        "keys": [key.hex() for key in event.keys],
        "parents": [parent.hex() for parent in event.parents],
        "sizes": list(event.sizes_bytes),
    }


def _event(found: dict[str, Any]) -> BlockEvent | LostEvents:
    kind = found.get("event")
    if kind not in (STORED, READ, REMOVED, GAP):
        raise TraceError(f"event is {kind!r}, not stored, read, removed or gap")
    timestamp_ms: Any = found.get("timestamp")
    if type(timestamp_ms) not in (int, float) or not 0 <= timestamp_ms <= MAX_TIMESTAMP_MS:
        raise TraceError(f"timestamp is {timestamp_ms!r}, not a number of milliseconds")
    node, tenant = _text(found, "node"), _text(found, "tenant")
    if kind == GAP:
        lost = found.get("lost")
        if lost is not None and not _is_count(lost):
            raise TraceError(f"lost is {lost!r}, neither a number of events nor null")
        return LostEvents(timestamp_ms, node, tenant, lost)
    keys, parents = _keys(found, "keys", min_bytes=1), _keys(found, "parents", min_bytes=0)
    sizes = found.get("sizes")
    if type(sizes) is not list or not all(_is_count(size) for size in sizes):
        raise TraceError("sizes is not a list of numbers of bytes")
    if not len(keys) == len(parents) == len(sizes) > 0:
        raise TraceError(f"{len(keys)} keys, {len(parents)} parents and {len(sizes)} sizes: there must be equally many, at least one")
    return BlockEvent(kind, timestamp_ms, node, tenant, keys, parents, sizes)


def _text(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    if type(value) is not str:
        raise TraceError(f"{name} is {value!r}, not a text")
    return value


def _keys(found: dict[str, Any], name: str, *, min_bytes: int) -> list[bytes]:
    values = found.get(name)
    try:
        if type(values) is not list:
            raise TypeError
        keys = [bytes.fromhex(value) for value in values]
    except (TypeError, ValueError):
        raise TraceError(f"{name} is not a list of hexadecimal keys") from None
    if any(not min_bytes <= len(key) <= MAX_KEY_BYTES for key in keys):
        raise TraceError(f"{name} has a key that is not {min_bytes} to {MAX_KEY_BYTES} bytes long")
    return keys


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
