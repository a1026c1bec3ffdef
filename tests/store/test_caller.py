"""Promises of caller.py: what is kept of a connection does not grow for as long as that lasts."""

from kvstore.security.identity import EVERYBODY
from kvstore.store.admission import MANY_SLABS, Caller


def test_slabs_that_are_gone_are_forgotten_once_they_are_many() -> None:
    caller = Caller("red", EVERYBODY)
    most = 0
    for slab in range(20 * MANY_SLABS):
        (caller.exported if slab % 2 else caller.pointed_at).add(slab)
        caller.forget_gone(lambda known, newest=slab: known > newest - 10)  # type: ignore[misc]
        most = max(most, len(caller.exported) + len(caller.pointed_at))
    assert set(range(20 * MANY_SLABS - 10, 20 * MANY_SLABS)) <= caller.exported | caller.pointed_at, "those that are there are known"
    assert most <= MANY_SLABS + 2 * 10 + 1
