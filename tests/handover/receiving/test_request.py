"""Promises of receiving/request.py: each sender gives what it owes once; over is everything, asked, taken and confirmed."""

import pytest

from kvstore.handover.movements.parts import Chunk, PartId, PartPlan, RequestState
from kvstore.handover.receiving.request import CacheReceiver
from kvstore.protocol.errors import ProtocolError

DIRECT = PartPlan(range(4), (Chunk(0, 64),), 4, 100)
GATHERED = PartPlan(range(4), (Chunk(0, 32), Chunk(32, 64)), 2, 100, slot_bytes=100)
NOTHING = PartPlan(range(0), (), 1, 0)


def state_of(machine: CacheReceiver) -> RequestState:
    return machine.state


def offer(machine: CacheReceiver, rank: int, part: PartId, slot: int = 0, size_bytes: int = 100) -> None:
    machine.offered(rank, part, slot, slots=2, size_bytes=size_bytes)


def test_what_was_read_counts_once_the_sender_confirms_it() -> None:
    machine = CacheReceiver({0: DIRECT, 1: NOTHING}, confirming=[0, 1])
    machine.answered(0)
    machine.answered(1)
    with pytest.raises(ProtocolError, match="confirms data that was not read"):
        machine.confirmed(0)
    offer(machine, 0, PartId(0, 4, 0))
    machine.taken(0, PartId(0, 4, 0), 400)
    assert state_of(machine) is RequestState.MOVING
    assert machine.needs(0)
    machine.confirmed(0)
    assert state_of(machine) is RequestState.OVER
    with pytest.raises(ProtocolError, match="confirms data that was not read"):
        machine.confirmed(0)


@pytest.mark.parametrize("part", [PartId(0, 1, 1), PartId(3, 5, 0), PartId(2, 2, 0)])
def test_what_a_sender_does_not_owe_is_refused(part: PartId) -> None:
    machine = CacheReceiver({0: DIRECT})
    with pytest.raises(ProtocolError, match="was not requested"):
        offer(machine, 0, part)
    with pytest.raises(ProtocolError, match="was not requested"):
        offer(machine, 1, PartId(0, 1, 0))
    assert not machine.needs(1)


def test_a_slot_that_is_not_there_taken_or_too_small_is_refused() -> None:
    machine = CacheReceiver({0: GATHERED})
    offer(machine, 0, PartId(0, 2, 0), slot=1)
    for slot, size_bytes in ((1, 100), (2, 100), (0, 101)):
        with pytest.raises(ProtocolError, match="slot"):
            offer(machine, 0, PartId(2, 4, 0), slot, size_bytes)
    machine.taken(0, PartId(0, 2, 0), 100)
    offer(machine, 0, PartId(2, 4, 0), slot=1)
