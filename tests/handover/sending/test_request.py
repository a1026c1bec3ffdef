"""Promises of sending/request.py: each requesting rank receives each ready part once, in time and within its slots.

The request is over once all ranks have all parts.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handover.movements.parts import Chunk, PartId, PartPlan, RequestState
from kvstore.handover.sending.request import CacheSender, PartOffer
from kvstore.protocol.errors import ProtocolError

DIRECT = PartPlan(range(4), (Chunk(0, 64),), 4, 100)
GATHERED = PartPlan(range(4), (Chunk(0, 32), Chunk(32, 64)), 2, 100, slot_bytes=100)


def state_of(machine: CacheSender) -> RequestState:
    return machine.state


def sender(*ranks: int, plan: PartPlan = DIRECT, batch_bytes: int = 0, slots: int = 2) -> CacheSender:
    """Return a sender with a request from each of `ranks`."""
    machine = CacheSender(range(4), batch_bytes=batch_bytes)
    machine.expect(ranks)
    for rank in ranks:
        machine.asked(rank, plan, slots=slots)
    return machine


def ready(machine: CacheSender, *layers: int) -> None:
    for layer in layers:
        machine.layer_ready(layer)


def test_small_layers_wait_for_one_another_but_not_for_none() -> None:
    machine = sender(0, batch_bytes=250)
    ready(machine, 0, 1)
    assert machine.due() == []
    ready(machine, 2)
    assert machine.due() == [PartOffer(0, PartId(0, 3, 0), 0)]
    ready(machine, 3)
    assert machine.due() == [PartOffer(0, PartId(3, 4, 0), 0)]


def test_gathered_parts_wait_for_a_slot() -> None:
    machine = sender(0, plan=GATHERED)
    ready(machine, 0, 1, 2, 3)
    first, second = machine.due()
    assert (first.part, second.part) == (PartId(0, 2, 0), PartId(0, 2, 1))
    assert {first.slot, second.slot} == {0, 1}
    assert machine.due() == []
    machine.acknowledged(0, second.part, 50)
    assert machine.due() == [PartOffer(0, PartId(2, 4, 0), second.slot)]


def test_who_takes_nothing_or_asks_twice_is_refused() -> None:
    with pytest.raises(ProtocolError, match="receives nothing"):
        CacheSender(range(4), batch_bytes=0).asked(0, DIRECT, slots=1)
    machine = sender(0)
    with pytest.raises(ProtocolError, match="receives nothing"):
        machine.asked(1, DIRECT, slots=1)
    with pytest.raises(ProtocolError, match="requested this already"):
        machine.asked(0, DIRECT, slots=1)
    assert not machine.needs(1)


@pytest.mark.parametrize("plan", [GATHERED, DIRECT])
def test_nobody_has_more_slots_than_there_can_be(plan: PartPlan) -> None:
    machine = CacheSender(range(4), batch_bytes=0)
    machine.expect([0])
    with pytest.raises(ProtocolError, match="4294967295"):
        machine.asked(0, plan, slots=0xFFFF_FFFF)


@given(st.permutations(range(4)), st.integers(0, 500), st.booleans(), st.randoms(use_true_random=False))
def test_every_layer_of_every_chunk_is_sent_once_in_any_order(
    order: list[int], batch_bytes: int, is_gathered: bool, random: "st.DataObject"
) -> None:
    plan = GATHERED if is_gathered else DIRECT
    machine = sender(0, 7, plan=plan, batch_bytes=batch_bytes)
    gone: dict[int, list[tuple[int, int]]] = {0: [], 7: []}
    under_way: list[PartOffer] = []
    for layer in [*order, *([order[0]] * 20)]:
        machine.layer_ready(layer)
        under_way += machine.due()
        random.shuffle(under_way)  # type: ignore[attr-defined]
        if under_way:
            offer = under_way.pop()
            gone[offer.rank] += offer.part.units
            machine.acknowledged(offer.rank, offer.part, 1)
    assert state_of(machine) is RequestState.OVER
    expected = [(layer, chunk) for layer in range(4) for chunk in range(len(plan.chunks))]
    assert sorted(gone[0]) == sorted(gone[7]) == expected
