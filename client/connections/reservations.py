"""Reservations of a client's puts: those that will not be used, which go back to the master so that nobody waits for them to expire; and
the nodes of other hosts that take small puts without one. Sans-I/O: see effects.py."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.partition_requests import places
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.protocol.errors import Full, KVStoreError, QuotaExceeded, TierFailed, Unavailable
from kvstore.protocol.master_messages import CancelReservations
from kvstore.protocol.session_messages import Ok
from kvstore.rpc.deadline import Deadline

REFUSALS: Final = (Unavailable, Full, QuotaExceeded, TierFailed)
"""Errors of a target after which the put is reserved: another node may take it."""
TARGET_NS: Final = 1_000_000_000
"""Time after which the master places a size anew: it knows of free room, load and drains what clients do not."""


class PutTargets:
    """Target nodes by size class, a power of two each: at most one entry a bit of a size. Thread-safe: each step is one operation of a
    dictionary."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._chosen: dict[int, tuple[int, int]] = {}
        """(node id, time in ns at which it ends) by size class."""

    def learn(self, sizes: Iterable[int], node_id: int) -> None:
        """The master chose this node for values of these sizes."""
        until_ns = self._clock_ns() + TARGET_NS
        self._chosen.update((size_bytes.bit_length(), (node_id, until_ns)) for size_bytes in sizes)

    def node_id(self, size_bytes: int) -> int:
        """Node for a value of that size; 0: the master is to choose."""
        chosen = self._chosen.get(size_bytes.bit_length())
        return chosen[0] if chosen is not None and self._clock_ns() < chosen[1] else 0

    def forget(self, node_id: int) -> None:
        """The node refused a put or cannot be reached."""
        for size_class, (chosen, _) in list(self._chosen.items()):
            if chosen == node_id:
                self._chosen.pop(size_class, None)


CLEANUP_S: Final = 0.2
"""Time for telling a daemon that something will not come, after the operation failed and perhaps used up its own."""
TIDY_S: Final = 5.0
"""The same in the background, where nobody waits for it."""


class UnusedReservations(Protocol):
    """A put that is over and has used part of what it reserved."""

    def unused(self) -> CancelReservations:
        """What gives back the rest."""


class ClientReservations:
    """What a client has reserved and will not use."""

    def __init__(self, daemons: ClusterConnections) -> None:
        self._daemons = daemons
        self.unused: deque[UnusedReservations] = deque()
        """Puts that failed or were interrupted, until the master knows that what they reserved will not be used."""

    def cancel(self, message: CancelReservations, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Give reservations back, as far as the master can be told soon; the others expire."""
        if message.keys:
            deadline = Deadline(timeout_s)
            with contextlib.suppress(KVStoreError):
                found = yield from places(self._daemons, message.keys, deadline)
                if len(found) == 1:
                    yield from self._cancel(next(iter(found)), message, deadline)
                else:
                    keys, generations = message.keys, message.generations
                    parts = {
                        partition: CancelReservations([keys[i] for i in at], [generations[i] for i in at])
                        for partition, at in found.items()
                    }
                    yield GatherEffect([self._cancel(partition, part, deadline) for partition, part in parts.items()])

    def _cancel(self, partition: int, message: CancelReservations, deadline: Deadline) -> Operation[None]:
        """Raises nothing: what one master cannot be told must not keep the others from hearing."""
        with contextlib.suppress(KVStoreError):
            yield from self._daemons.ask_master(message, Ok, deadline, partition=partition)

    def give_up(self, put: UnusedReservations, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Give back what this one of `unused` had reserved. Several threads may do so at once: to cancel twice does no harm."""
        try:
            yield from self.cancel(put.unused(), timeout_s)
        finally:
            with contextlib.suppress(ValueError):
                self.unused.remove(put)

    def give_up_unused(self) -> Operation[None]:
        """The same for all of them, in the background: a call that waited for each would be late by as many times CLEANUP_S."""
        while self.unused:
            yield from self.give_up(self.unused[0], TIDY_S)
