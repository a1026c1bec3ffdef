"""Reservations of a client's puts: unused ones, which are cancelled so that other writers need not wait for their
expiry, and target nodes for small puts without one. Sans-I/O: see effects.py."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.partition_requests import split_by_partition
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.protocol.errors import Full, KVStoreError, QuotaExceeded, TierFailed, Unavailable
from kvstore.protocol.master_messages import CancelReservations
from kvstore.protocol.session_messages import Ok
from kvstore.rpc.deadline import Deadline

REFUSALS: Final = (Unavailable, Full, QuotaExceeded, TierFailed)
"""Errors of a target node after which the put is reserved at the master: another node may take it."""
TARGET_NS: Final = 1_000_000_000
"""Lifetime of a target: afterwards the master, which knows free space, load and drains, chooses again."""


class PutTargets:
    """Remote target nodes by size class (powers of two). Thread-safe: each step is one dict operation."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._chosen: dict[int, tuple[int, int]] = {}
        """(node id, expiry in ns) by size class."""

    def learn(self, sizes: Iterable[int], node_id: int) -> None:
        """Remember the node that the master chose for values of these sizes."""
        until_ns = self._clock_ns() + TARGET_NS
        self._chosen.update((size_bytes.bit_length(), (node_id, until_ns)) for size_bytes in sizes)

    def node_id(self, size_bytes: int) -> int:
        """Target for a value of that size; 0: ask the master."""
        chosen = self._chosen.get(size_bytes.bit_length())
        return chosen[0] if chosen is not None and self._clock_ns() < chosen[1] else 0

    def forget(self, node_id: int) -> None:
        """Drop a node that refused a put or is unreachable."""
        for size_class, (chosen, _) in list(self._chosen.items()):
            if chosen == node_id:
                self._chosen.pop(size_class, None)


CLEANUP_S: Final = 0.2
"""Time for a cleanup request after an operation failed, perhaps at its deadline."""
BACKGROUND_CLEANUP_S: Final = 5.0
"""The same in the background."""


class UnusedReservations(Protocol):
    """A finished put with reservations that it did not use."""

    def unused(self) -> CancelReservations:
        """The request that cancels them."""


class ClientReservations:
    """Reservations of one client that will not be used."""

    def __init__(self, daemons: ClusterConnections) -> None:
        self._daemons = daemons
        self.unused: deque[UnusedReservations] = deque()
        """Failed or interrupted puts, until their reservations are cancelled."""

    def cancel(self, message: CancelReservations, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Cancel reservations, within `timeout_s`; those that cannot be cancelled expire."""
        if message.keys:
            deadline = Deadline(timeout_s)
            with contextlib.suppress(KVStoreError):
                found = yield from split_by_partition(self._daemons, message.keys, deadline)
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
        """Cancel at one master. Errors are dropped, so that the other masters still get their part."""
        with contextlib.suppress(KVStoreError):
            yield from self._daemons.call_master(message, Ok, deadline, partition=partition)

    def give_up(self, put: UnusedReservations, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Cancel the reservations of one of `unused`. Safe to run concurrently: cancelling twice is harmless."""
        try:
            yield from self.cancel(put.unused(), timeout_s)
        finally:
            with contextlib.suppress(ValueError):
                self.unused.remove(put)

    def cancel_all_unused(self) -> Operation[None]:
        """Cancel those of all unused puts, in the background: a call that waited would be late by CLEANUP_S for
        each."""
        while self.unused:
            yield from self.give_up(self.unused[0], BACKGROUND_CLEANUP_S)
