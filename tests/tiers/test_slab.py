"""Promises of slab.py: what a slab comes to, and when nobody has anything in it."""

from kvstore.tiers.slab import Group, Slab


def test_a_slab_is_as_large_as_its_slots_and_knows_those_that_were_used() -> None:
    slab = Slab(3, Group(1, "red", 100), 7)
    assert (slab.size_bytes, slab.touched) == (700, 0)
    slab.generations.extend((5, 0))
    assert slab.touched == 2


def test_a_slab_is_vacant_without_slots_in_use_or_in_quarantine() -> None:
    slab = Slab(3, Group(1, "red", 100), 7)
    assert slab.is_vacant
    slab.used = 1
    assert not slab.is_vacant
    slab.used, slab.quarantined[0] = 0, 5
    assert not slab.is_vacant
