"""Replicas that a put asks for: the master is told how many, and has nodes make them. Sans-I/O: see effects.py."""

from collections.abc import Sequence
from typing import Final

from kvstore.client.by_partition import by_partition
from kvstore.client.daemons import Daemons
from kvstore.client.effects import Operation, Sleep
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Replicate
from kvstore.protocol.message import REPLICAS_ABSENT, REPLICAS_NOT_YET, REPLICAS_NOWHERE
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline

FIRST_PAUSE_S: Final = 0.001
MAX_PAUSE_S: Final = 0.05
"""Between questions whether the copies are there: doubles from the first to the last."""
PAUSE_A_KEY_S: Final = 20e-6
"""And no less for each block that is asked about, so that whoever waits for many does not keep the master busy."""


def replicate(daemons: Daemons, keys: Sequence[bytes], count: int, deadline: Deadline, *, waits: bool) -> Operation[None]:
    """Have these blocks, which the cluster knows, at `count` nodes; with `waits` come back once they are.

    Raises Unavailable: there are not so many nodes that take blocks, or a block has been evicted since. What there is of them stays, and
    is copied once there are. Raises DeadlineExceeded: not all copies were made in time; they will be.
    """

    def ask(partition: int, keys: Sequence[bytes]) -> Operation[list[int]]:
        return list((yield from daemons.ask_master(Replicate(list(keys), count), Flags, deadline, partition=partition)).flags)

    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), MAX_BATCH):
        pending, pause_s = unique[start : start + MAX_BATCH], FIRST_PAUSE_S
        while pending:
            flags = yield from by_partition(daemons, pending, deadline, ask)
            if not waits:
                break
            if REPLICAS_NOWHERE in flags:
                raise Unavailable(f"there are no {count} nodes that take blocks: the blocks are stored, and copied once there are")
            if REPLICAS_ABSENT in flags:
                raise Unavailable("a block was evicted before it was copied: the cluster is too full for so many replicas")
            pending = [key for key, flag in zip(pending, flags, strict=True) if flag == REPLICAS_NOT_YET]
            if pending:
                yield Sleep(min(max(pause_s, len(pending) * PAUSE_A_KEY_S), deadline.left_s()))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
