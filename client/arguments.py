"""What a caller's arguments must be. Nothing is sent for those that are refused."""

from collections.abc import Sequence
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES, check_key
from kvstore.protocol.message import MAX_REPLICAS

KEY_LENGTHS: Final = frozenset(range(1, MAX_KEY_BYTES + 1))

MAX_PIN_S: Final = 30 * 24 * 3600
"""A month: who wants more pins without an end."""


def check_keys(keys: Sequence[bytes]) -> set[int]:
    """The lengths that they have. Raises InvalidArgument unless every key is 1 to 255 bytes and `keys` is not itself one key."""
    if isinstance(keys, (bytes, str)):
        raise InvalidArgument("keys is a sequence of keys, not one key")
    if list(map(type, keys)).count(bytes) == len(keys) and (lengths := set(map(len, keys))) <= KEY_LENGTHS:
        return lengths  # as a rule, and much faster
    for key in keys:
        check_key(key)
    return set(map(len, keys))


def namespace_text(namespace: Any) -> str:
    """The text of a namespace given as such, or of an object with an `id` of bytes. Raises InvalidArgument for anything else, and for half
    a surrogate pair, which has no UTF-8: a connection that was to send it would be given up."""
    if isinstance(namespace, str):
        try:
            namespace.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"a namespace is text that UTF-8 has, not {namespace!a:.50}: {error.reason}") from None
        return namespace
    identity = getattr(namespace, "id", None)
    if isinstance(identity, bytes):
        return identity.hex()
    raise InvalidArgument(f"a namespace is a str or has an id of bytes; {type(namespace).__name__} is neither")


def check_parents(parents: Sequence[bytes | None] | None, count: int) -> None:
    """Raises InvalidArgument unless there is a key or None for each of `count` keys."""
    if parents is None:
        return
    if len(parents) != count:
        raise InvalidArgument(f"{len(parents)} parents for {count} keys")
    for parent in parents:
        if parent is not None:
            check_key(parent)


def check_offsets(offsets: Sequence[int], count: int) -> None:
    """Raises InvalidArgument unless there is an integer for each of `count` keys."""
    if len(offsets) != count:
        raise InvalidArgument(f"{len(offsets)} offsets for {count} keys")
    for offset in offsets:
        if not isinstance(offset, int):
            raise InvalidArgument(f"an offset is a number of bytes, not {offset!r:.50}")


def check_deadline(deadline_s: float) -> None:
    """Raises InvalidArgument unless it is a number above 0 and at most an hour."""
    if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s <= 3600:
        raise InvalidArgument(f"deadline_s is a number of seconds above 0 and up to 3600, not {deadline_s!r}")


def check_ttl(ttl_s: float) -> None:
    """Raises InvalidArgument unless it is a number of seconds that a pin may last."""
    if not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_PIN_S:
        raise InvalidArgument(f"ttl_s is a number of seconds above 0 and up to {MAX_PIN_S}, not {ttl_s!r}")


def check_ack(ack: str) -> None:
    """Raises InvalidArgument unless it says when a put is answered."""
    if ack not in ("node", "cluster", "replicas"):
        raise InvalidArgument(f"ack is 'node', 'cluster' or 'replicas', not {ack!r}")


def check_replicas(replicas: int) -> None:
    """Raises InvalidArgument unless a block can be asked to be at so many nodes."""
    if type(replicas) is not int or not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidArgument(f"a block has 1 to {MAX_REPLICAS} replicas, not {replicas!r}")


def check_count(keys: Sequence[bytes], others: Sequence[Any], name: str) -> None:
    """Raises InvalidArgument unless there is one for each key."""
    if len(keys) != len(others):
        raise InvalidArgument(f"{len(others)} {name} for {len(keys)} keys")
