"""Retention hints of a client's calls, and the ends of its sessions. Sans-I/O: see effects.py.

A hint of a put or get is one message to the node that took the blocks, or to the local one, after the call. It may
fail without an error. Blocks that are not there, and those of `retain`, are looked up at the masters, and each holder
gets a message.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, Final

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.client.metadata_requests import MetadataOperations
from kvstore.protocol.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import RETAIN_PUT, RETAIN_READ, RETAIN_SET, ReleaseSession, Retain
from kvstore.protocol.retention import Retention, session_id
from kvstore.protocol.session_messages import Count, Flags
from kvstore.rpc.deadline import Deadline

HINT_S: Final = 1.0
"""Most time that the hint of a put or get adds to it: its blocks are stored or read by then."""
KEYS_AT_ONCE: Final = 4096
"""Keys of one message: the node applies a hint with `reuse_s` to them in about 20 ms of its loop."""


def check_retention(retention: Retention | None) -> None:
    """Raises InvalidArgument unless it is a Retention or None."""
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidArgument(f"retention is a Retention or None, not a {type(retention).__name__}")


class RetentionOperations:
    """Sends hints. Threads and tasks of a client share it."""

    def __init__(self, resources: ClientResources, metadata: MetadataOperations) -> None:
        self._daemons = resources.daemons
        self._locations = resources.hints
        self._uncommitted = resources.uncommitted_puts
        self._counters = resources.counters
        self._metadata = metadata

    def after_put(self, keys: Sequence[bytes], stored: Sequence[Any], retention: Retention, deadline: Deadline) -> Operation[None]:
        """Send the hint of a put. `stored`: True for each key that the put stored, False if others had; keys with
        another result are left out. Failures are counted."""
        new = [key for key, result in zip(keys, stored, strict=True) if result is True]
        old = [key for key, result in zip(keys, stored, strict=True) if result is False]
        yield from self._send(dict.fromkeys(new), retention, RETAIN_PUT, deadline)
        yield from self._send(dict.fromkeys(old), retention, RETAIN_READ, deadline)

    def after_read(self, keys: Sequence[bytes], found: Sequence[Any], retention: Retention, deadline: Deadline) -> Operation[None]:
        """Send the hint of a get. `found`: the result of each key; None and errors are left out. Failures are
        counted."""
        is_read = [result is not None and not isinstance(result, KVStoreError) for result in found]
        return self._send(dict.fromkeys(compress(keys, is_read)), retention, RETAIN_READ, deadline)

    def retain(self, keys: Sequence[bytes], retention: Retention, deadline: Deadline) -> Operation[int]:
        """Apply the hint at all holders of the blocks; return how many blocks have it now. Raises as `locate`, and
        Denied."""
        unique = list(dict.fromkeys(keys))
        if not unique:
            return 0
        self._counters.add(requests=1)
        yield from self._uncommitted.settle(deadline)
        return len((yield from self._apply(unique, retention, RETAIN_SET, deadline)))

    def end_session(self, session: str, deadline: Deadline) -> Operation[int]:
        """End the session at all live nodes; return how many blocks they will evict first. Raises Unavailable once the
        others have ended it, if a node does not answer."""
        message = ReleaseSession(session_id(session))
        self._counters.add(requests=1)
        yield from self._daemons.refresh_nodes(deadline)
        counts: list[int] = []
        failures: list[Unavailable] = []

        def end_at(node: KnownNode) -> Operation[None]:
            try:
                connection, reply = yield from self._daemons.begin(node.route, message, Count, deadline)
            except Unavailable as error:
                failures.append(Unavailable(f"session {session!r:.50} did not end on node {node.name!r}: {error}"))
                return
            connection.release()
            counts.append(reply.value)

        yield from _together([end_at(node) for node in self._daemons.nodes.all()])
        if failures:
            raise failures[0]
        return sum(counts)

    def _send(self, keys: Iterable[bytes], retention: Retention, cause: int, deadline: Deadline) -> Operation[None]:
        """Send a hint to the nodes that are likely to hold the blocks, then to the holders of the others."""
        left = list(keys)
        if not left:
            return
        with suppress(KVStoreError):
            within = deadline.part(HINT_S)
            for node, mine in self._likely_holders(left, prefers_local=cause == RETAIN_READ):
                applied = yield from self._retain_at(node, mine, retention, cause, within)
                left = [key for key in left if key not in applied]
            if left:
                applied = yield from self._apply(left, retention, cause, within)
                left = [key for key in left if key not in applied]
        if left:
            self._counters.add(lost_retention_hints=len(left))

    def _likely_holders(self, keys: Sequence[bytes], *, prefers_local: bool) -> list[tuple[KnownNode, list[bytes]]]:
        """Return the keys by known node: the one where this client has put or found the block last, or the local
        one."""
        nodes, by_node = self._daemons.nodes, dict[int, list[bytes]]()
        for key, location in zip(keys, self._locations.find(keys), strict=True):
            node_id = nodes.local_id if location is None or (prefers_local and nodes.local_id) else location.node_id
            by_node.setdefault(node_id, []).append(key)
        return [(node, mine) for node_id, mine in by_node.items() if (node := nodes.get(node_id)) is not None]

    def _apply(self, keys: Sequence[bytes], retention: Retention, cause: int, deadline: Deadline) -> Operation[set[bytes]]:
        """Send the hint to the local node, which may have uncommitted blocks, and to all holders that the masters know;
        return the keys to which it was applied. Holders that do not answer are left out."""
        by_node: dict[int, list[bytes]] = {}
        for key, locations in zip(keys, (yield from self._metadata.locate(keys, deadline)), strict=True):
            for node_id in {location.node_id for location in locations} | {self._daemons.nodes.local_id}:
                by_node.setdefault(node_id, []).append(key)
        applied: set[bytes] = set()

        def apply_at(node: KnownNode, mine: Sequence[bytes]) -> Operation[None]:
            with suppress(Unavailable):
                applied.update((yield from self._retain_at(node, mine, retention, cause, deadline)))

        holders = [(node, mine) for node_id, mine in by_node.items() if (node := self._daemons.nodes.get(node_id)) is not None]
        yield from _together([apply_at(node, mine) for node, mine in holders])
        return applied

    def _retain_at(
        self, node: KnownNode, keys: Sequence[bytes], retention: Retention, cause: int, deadline: Deadline
    ) -> Operation[set[bytes]]:
        """Send the hint to one node; return the keys to which it was applied."""
        applied: set[bytes] = set()
        for start in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[start : start + KEYS_AT_ONCE]
            connection, reply = yield from self._daemons.begin(node.route, _message(part, retention, cause), Flags, deadline)
            connection.release()
            applied.update(compress(part, reply.flags))
        return applied


def _message(keys: Sequence[bytes], retention: Retention, cause: int) -> Message:
    return Retain(
        list(keys),
        retention.priority,
        _as_ms(retention.ttl_s),
        _as_ms(retention.reuse_s),
        session_id(retention.session) if retention.session is not None else 0,
        cause,
    )


def _as_ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, round(seconds * 1000))


def _together(operations: Sequence[Operation[None]]) -> Operation[None]:
    if len(operations) == 1:
        yield from operations[0]
    elif operations:
        yield GatherEffect(operations)
