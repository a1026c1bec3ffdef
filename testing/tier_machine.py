"""Conformance of tiers in any order of operations, as a state machine to inherit. Needs the `dev` extra (pytest, hypothesis).

class MineAgainstDict(OpenMine, TierMachine): ...    # OpenMine: see conformance.py
TestMineAgainstDict = MineAgainstDict.TestCase
TestMineAgainstDict.settings = MACHINE_SETTINGS
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.protocol.errors import StaleHandle
from kvstore.testing.tier_conformance import OpensTier, get, read, record, value
from kvstore.tiers.tier import Slot, TierFull

MACHINE_SETTINGS = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=40)
"""For `TestX.settings` of a state machine: the same schedules in every run, without a time limit per step."""


@pytest.mark.promise("space-accounted")
class TierMachine(OpensTier, RuleBasedStateMachine):
    """State machine that compares a tier, under any schedule of operations, with a dict from serial number to bytes."""

    CAPACITY_BYTES = 2000
    UNIT_BYTES = 1
    """Sizes and the capacity are multiples of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tier = self.open_tier(self.folder, self.CAPACITY_BYTES * self.UNIT_BYTES)
        self.values: dict[int, bytes] = {}
        self.slots: dict[int, Slot] = {}
        self.given_back: list[Slot] = []
        self.in_quarantine: list[Slot] = []
        self.serial = 0
        self.tenants: dict[int, str] = {}

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)

    @rule(sizes=st.lists(st.sampled_from([1, 99, 100, 333, 500]), max_size=4), tenant=st.sampled_from(["", "red"]))
    def put(self, sizes: list[int], tenant: str) -> None:
        records = []
        for units in sizes:
            size_bytes = units * self.UNIT_BYTES
            used_bytes = self.tier.used_bytes
            try:
                slot = self.tier.allocate(size_bytes, tenant=tenant)
            except TierFull:
                assert self.tier.used_bytes == used_bytes
                break
            assert slot.group == self.tier.group(size_bytes, tenant=tenant)
            self.serial += 1
            self.slots[self.serial], self.values[self.serial] = slot, value(self.serial, size_bytes)
            self.tenants[self.serial] = tenant
            records.append(record(slot, value(self.serial, size_bytes), str(self.serial).encode()))
        self.tier.write_batch(records)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), gently=st.booleans())
    def give_back(self, data: st.DataObject, gently: bool) -> None:
        serial = data.draw(st.sampled_from(sorted(self.slots)))
        slot = self.slots.pop(serial)
        del self.values[serial]
        if gently:
            self.tier.quarantine(slot)
            self.in_quarantine.append(slot)
        else:
            self.tier.free(slot)
        self.given_back.append(slot)

    @precondition(lambda self: self.in_quarantine)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tier.release(self.in_quarantine.pop(data.draw(st.integers(0, len(self.in_quarantine) - 1))))

    @precondition(lambda self: self.tier.durable)
    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open_tier(self.folder, self.CAPACITY_BYTES * self.UNIT_BYTES)
        found = {int(found.tag): found.slot for found in self.tier.recover()}
        self.slots = {serial: self.tier.adopt(slot, tenant=self.tenants[serial]) for serial, slot in found.items()}
        self.given_back, self.in_quarantine = [], []

    @rule()
    def stale_handles_are_refused(self) -> None:
        assert all(isinstance(read(self.tier, slot), StaleHandle) for slot in self.given_back)

    @invariant()
    def every_value_is_the_one_put(self) -> None:
        assert dict(zip(self.slots, get(self.tier, list(self.slots.values())), strict=True)) == self.values

    @invariant()
    def bytes_add_up(self) -> None:
        tier = self.tier
        tier.check_integrity()
        assert tier.used_bytes + tier.quarantined_bytes + tier.free_bytes == tier.capacity_bytes == self.CAPACITY_BYTES * self.UNIT_BYTES
        assert sum(slot.size_bytes for slot in self.slots.values()) <= tier.used_bytes
        assert sum(tier.tenant_bytes.values()) == tier.used_bytes + tier.quarantined_bytes
        for tenant in ("", "red"):
            own_bytes = sum(slot.size_bytes for serial, slot in self.slots.items() if self.tenants[serial] == tenant)
            assert own_bytes <= tier.tenant_bytes.get(tenant, 0)
