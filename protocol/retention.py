"""Retention hints: what a caller knows about the value and the future reads of its blocks."""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import InvalidArgument, ProtocolError

PRIORITIES: Final = 100
"""Highest priority; the lowest is 0."""
DEFAULT_PRIORITY: Final = 50
MAX_RETENTION_S: Final = 7 * 86_400.0
"""Longest `ttl_s` and `reuse_s`."""
MAX_SESSION_CHARACTERS: Final = 256
_COPIED: Final = struct.Struct("<IBIQ")
CopiedHint = tuple[int, int, int, int]
"""Live hint of a block that another node copies: index of the block's key in the request, priority (NO_PRIORITY: the
block has a session only), ttl_ms (0: no end), session (0: none). A block has one for a priority without an end, and
another for a higher priority with one."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Hint for blocks that are put or read together. A hint changes the order of eviction within its tenant; it keeps no
    block by force, as a pin does.

    Raises InvalidArgument for a value out of range.
    """

    priority: int = DEFAULT_PRIORITY
    """0 to 100; scales the value of the blocks. 0: evicted first; 50: as without a hint."""
    ttl_s: float | None = None
    """Seconds after which `priority` ends; the blocks stay. None: it does not end. Of several hints on a block the
    highest live priority counts."""
    session: str | None = None
    """Name of the conversation or agent that uses the blocks, up to 256 characters, within the tenant. `end_session`
    frees the blocks that no other session used."""
    reuse_s: float | None = None
    """Seconds until the blocks are expected to be read again. None: unknown."""

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not 0 <= self.priority <= PRIORITIES:
            raise InvalidArgument(f"priority is a whole number from 0 to {PRIORITIES}, not {self.priority!r:.50}")
        _check_seconds("ttl_s", self.ttl_s)
        _check_seconds("reuse_s", self.reuse_s)
        if self.session is not None:
            session_id(self.session)


def session_id(session: str) -> int:
    """Return the 64 bits by which a session is known to nodes; never 0. Raises InvalidArgument for an invalid name."""
    if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION_CHARACTERS:
        raise InvalidArgument(f"session is a name of 1 to {MAX_SESSION_CHARACTERS} characters, not {session!r:.50}")
    return int.from_bytes(hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


def pack_hints(hints: Iterable[CopiedHint]) -> bytes:
    """Encode the `hints` of ReadBlocksReply; none take no bytes."""
    return b"".join([_COPIED.pack(*hint) for hint in hints])


def unpack_hints(hints: bytes) -> Iterator[CopiedHint]:
    """Decode the `hints` of ReadBlocksReply. Raises ProtocolError for a wrong length."""
    if len(hints) % _COPIED.size:
        raise ProtocolError(f"retention hints of {len(hints)} bytes: a row has {_COPIED.size}")
    return _COPIED.iter_unpack(hints)


def _check_seconds(name: str, value: float | None) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= MAX_RETENTION_S):
        raise InvalidArgument(f"{name} is a number of seconds above 0 and up to {MAX_RETENTION_S:.0f}, or None, not {value!r:.50}")
