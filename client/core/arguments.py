"""Checks of callers' arguments, before anything is sent."""

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES, check_key
from kvstore.protocol.message import MAX_REPLICAS
from kvstore.protocol.node_messages import MAX_PREFETCH_KEYS

KEY_LENGTHS: Final = frozenset(range(1, MAX_KEY_BYTES + 1))

MAX_HOLD_S: Final = 3600
MAX_SECONDS: Final = 1e9
MAX_PIN_S: Final = 30 * 24 * 3600
"""A month; for longer, pin without a ttl."""


def check_list(items: Any, name: str) -> None:
    """Raises InvalidArgument unless `items` is a sequence: a set or a dict would pair keys with other keys' values."""
    if type(items) is list or type(items) is tuple:
        return
    try:
        len(items)
        is_list = hasattr(items, "__getitem__") and not isinstance(items, (str, bytes, Set, Mapping))
    except TypeError:  # a generator, or a 0-d tensor
        is_list = False
    if str(getattr(items, "layout", "torch.strided")) != "torch.strided":
        raise InvalidArgument(f"{name} is a sparse tensor: pass tensor.to_dense()")
    if not is_list:
        raise InvalidArgument(f"{name} is a list or another sequence, not a {type(items).__name__}: pass list(...) in your order")


def check_keys(keys: Sequence[bytes]) -> set[int]:
    """Return the set of key lengths. Raises InvalidArgument unless every key is 1 to 255 bytes and `keys` is not itself
    one key."""
    if isinstance(keys, (bytes, str)):
        raise InvalidArgument("keys is a sequence of keys, not one key")
    check_list(keys, "keys")
    if list(map(type, keys)).count(bytes) == len(keys) and (lengths := set(map(len, keys))) <= KEY_LENGTHS:
        return lengths  # the common case, and much faster
    for key in keys:
        check_key(key)
    return set(map(len, keys))


def namespace_text(namespace: Any) -> str:
    """Text of a namespace given as such, or as an object with an `id` of bytes.

    Raises InvalidArgument for anything else, and for an unpaired surrogate, which cannot be encoded as UTF-8 when it is
    sent.
    """
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


def check_parents(parents: Sequence[bytes | None] | None, keys: Sequence[bytes]) -> None:
    """Raises InvalidArgument unless there is a key or None for each of `keys`, and no key is its own ancestor."""
    if parents is None:
        return
    check_list(parents, "parents")
    if len(parents) != len(keys):
        raise InvalidArgument(f"{len(parents)} parents for {len(keys)} keys")
    for parent in parents:
        if parent is not None:
            check_key(parent)
    if not parents or (parents[0] not in keys and list(parents[1:]) == list(keys[:-1])):
        return  # the common case: the blocks of one prompt, in order
    _check_acyclic({key: parent for key, parent in zip(keys, parents, strict=True) if isinstance(key, bytes)})


def _check_acyclic(parent_of: dict[bytes, bytes | None]) -> None:
    """Raises InvalidArgument if a key is its own ancestor: the blocks of a cycle could never be evicted."""
    checked: set[bytes] = set()
    for first in parent_of:
        path: dict[bytes, None] = {}
        key: bytes | None = first
        while key in parent_of and key not in checked:
            if key in path:
                raise InvalidArgument(f"by these parents {key!r:.60} is its own ancestor: the parent of a prompt's first block is None")
            path[key] = None
            key = parent_of[key]
        checked.update(path)


def check_offsets(offsets: Sequence[int], count: int) -> list[int]:
    """Return the offsets as ints; numpy's integers are taken, too. Raises InvalidArgument unless there is one for each of
    `count` keys."""
    check_list(offsets, "offsets")
    if len(offsets) != count:
        raise InvalidArgument(f"{len(offsets)} offsets for {count} keys")
    try:
        return list(map(operator.index, offsets))
    except TypeError as error:
        raise InvalidArgument(f"an offset is a whole number of bytes: {error}") from None


def check_deadline(deadline_s: float) -> None:
    """Raises InvalidArgument unless it is a number above 0 and at most 3600."""
    if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s <= 3600:
        raise InvalidArgument(f"deadline_s is a number of seconds above 0 and up to 3600, not {deadline_s!r}")


def check_seconds(seconds: float | None, name: str) -> None:
    """Raises InvalidArgument unless it is None or a number; it may be negative, as the rest of an exhausted deadline
    is."""
    if seconds is not None and (not isinstance(seconds, (int, float)) or not -MAX_SECONDS < seconds < MAX_SECONDS):
        raise InvalidArgument(f"{name} is a number of seconds, not {seconds!r:.50}")


def check_ttl(ttl_s: float) -> None:
    """Raises InvalidArgument unless it is a valid duration of a pin."""
    if not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_PIN_S:
        raise InvalidArgument(f"ttl_s is a number of seconds above 0 and up to {MAX_PIN_S}, not {ttl_s!r}")


def check_hold(hold_s: float) -> None:
    """Raises InvalidArgument unless it is a valid duration of a hold."""
    if not isinstance(hold_s, (int, float)) or not 0 < hold_s <= MAX_HOLD_S:
        raise InvalidArgument(
            f"hold_s is a number of seconds above 0 and up to {MAX_HOLD_S}, not {hold_s!r}; omit the hold to look up without one"
        )


def check_prefetch(keys: Sequence[bytes], to: str) -> None:
    """Raises InvalidArgument unless `to` is a valid target and there are not too many keys."""
    if not isinstance(to, str) or to not in ("local", "dram"):
        raise InvalidArgument(f"to is 'local' or 'dram', not {to!r:.50}")
    if len(keys) > MAX_PREFETCH_KEYS:
        raise InvalidArgument(f"a prefetch takes at most {MAX_PREFETCH_KEYS} keys, not {len(keys)}: prefetch what is read first")


def check_ack(ack: str) -> None:
    """Raises InvalidArgument unless it is a valid acknowledgement."""
    if not isinstance(ack, str) or ack not in ("node", "cluster", "replicas"):
        raise InvalidArgument(f"ack is 'node', 'cluster' or 'replicas', not {ack!r}")


def check_replicas(replicas: int) -> None:
    """Raises InvalidArgument unless it is a valid replica target."""
    if type(replicas) is not int or not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidArgument(f"replicas is 1 to {MAX_REPLICAS}, not {replicas!r}")


def check_count(keys: Sequence[bytes], others: Sequence[Any], name: str) -> None:
    """Raises InvalidArgument unless both are sequences of equal length."""
    check_list(keys, "keys")
    check_list(others, name)
    if len(keys) != len(others):
        raise InvalidArgument(f"{len(others)} {name} for {len(keys)} keys")


def check_flag(flag: bool, name: str) -> None:
    """Raises InvalidArgument unless it is True or False."""
    if not isinstance(flag, bool):
        raise InvalidArgument(f"{name} is True or False, not {flag!r:.50}")


def check_hashable(value: Any, name: str) -> None:
    """Raises InvalidArgument unless it can be a key of a dict."""
    try:
        hash(value)
    except TypeError:
        raise InvalidArgument(f"{name} is hashable, such as a str or an int, not a {type(value).__name__}") from None


def check_limit(limit: int | None) -> None:
    """Raises InvalidArgument unless it is a positive number, or None for all."""
    if limit is not None and (type(limit) is not int or not 1 <= limit < 1 << 31):
        raise InvalidArgument(f"limit is a number from 1 on, or None for all, not {limit!r:.50}")


def check_arguments(master: Any, tenant: Any, token: Any, deadline_s: Any) -> None:
    """Raises InvalidArgument unless each is None, or `master` is one address or several, `tenant` and `token` are text
    and `deadline_s` is a deadline."""
    for name, text in (("tenant", tenant), ("token", token)):
        if text is not None and not isinstance(text, str):
            raise InvalidArgument(f"{name} is text, not a {type(text).__name__}")
    if master is not None and not isinstance(master, str):
        check_list(master, "master")
        if not all(isinstance(address, str) for address in master):
            raise InvalidArgument("master is HOST:PORT or unix:/PATH, or a list of such texts")
    if deadline_s is not None:
        check_deadline(deadline_s)


def check_kind(settings: Any, kind: type[Any], name: str) -> None:
    """Raises InvalidArgument unless it is None or an instance of `kind`."""
    if settings is not None and not isinstance(settings, kind):
        raise InvalidArgument(f"{name} is a {kind.__name__}, not a {type(settings).__name__}")
