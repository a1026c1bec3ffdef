"""How reservations that will not be used go back to the master, so that nobody waits for them to expire. Sans-I/O: see effects.py."""

import contextlib
from collections import deque
from typing import Final, Protocol

from kvstore.client.by_partition import places
from kvstore.client.daemons import Daemons
from kvstore.client.effects import Operation, Together
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.master_messages import Cancel
from kvstore.protocol.session_messages import Ok
from kvstore.rpc.deadline import Deadline

CLEANUP_S: Final = 0.2
"""Time for telling a daemon that something will not come, after the operation failed and perhaps used up its own."""
TIDY_S: Final = 5.0
"""The same in the background, where nobody waits for it."""


class Unused(Protocol):
    """A put that is over and has used part of what it reserved."""

    def unused(self) -> Cancel:
        """What gives back the rest."""


class Reservations:
    """What a client has reserved and will not use."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self.unused: deque[Unused] = deque()
        """Puts that failed or were interrupted, until the master knows that what they reserved will not be used."""

    def cancel(self, message: Cancel, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Give reservations back, as far as the master can be told soon; the others expire."""
        if message.keys:
            deadline = Deadline(timeout_s)
            with contextlib.suppress(KVStoreError):
                found = yield from places(self._daemons, message.keys, deadline)
                if len(found) == 1:
                    yield from self._cancel(next(iter(found)), message, deadline)
                else:
                    keys, generations = message.keys, message.generations
                    parts = {partition: Cancel([keys[i] for i in at], [generations[i] for i in at]) for partition, at in found.items()}
                    yield Together([self._cancel(partition, part, deadline) for partition, part in parts.items()])

    def _cancel(self, partition: int, message: Cancel, deadline: Deadline) -> Operation[None]:
        """Raises nothing: what one master cannot be told must not keep the others from hearing."""
        with contextlib.suppress(KVStoreError):
            yield from self._daemons.ask_master(message, Ok, deadline, partition=partition)

    def give_up(self, put: Unused, timeout_s: float = CLEANUP_S) -> Operation[None]:
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
