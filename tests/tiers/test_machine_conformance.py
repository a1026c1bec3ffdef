"""The state machine fails a tier that is unsound in some order of operations; sound ones run it in their own tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.tiers.dram import DramTier
from kvstore.tiers.machine_conformance import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.tier import Slot, Tier


class Unfenced(DramTier):
    """It reads whatever lies first in the first slab."""

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        for slot, destination in zip(slots, destinations, strict=True):
            destination[:] = self._pool.memory(0).bytes[: slot.size_bytes].data
        return [None] * len(slots)


class Forgetful(DramTier):
    """It counts for no tenant what it has quarantined."""

    @property
    def tenant_bytes(self) -> Mapping[str, int]:
        return {} if self.quarantined_bytes else super().tenant_bytes


@pytest.mark.parametrize("unsound", [Unfenced, Forgetful])
def test_an_unsound_tier_fails(unsound: type[DramTier]) -> None:
    class Machine(TierMachine):
        def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
            return unsound(capacity_bytes)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=settings(MACHINE_SETTINGS, phases=[Phase.generate]))
