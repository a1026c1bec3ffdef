"""Promises of shares.py: a refusal names the whole limit, which the operator has set, and what to do."""

import pytest

from kvstore.master.directory.shares import Share, unshared
from kvstore.security.quotas.quota import PINS, RESERVATIONS


@pytest.mark.parametrize(
    ("share", "used", "more"), [(Share(8, 8), 8, 1), (Share(2, 8), 2, 7)], ids=["one partition", "more than there is in all together"]
)
def test_what_nobody_could_give_exceeds_the_quota(share: Share, used: int, more: int) -> None:
    told = str(share.exceeded("red", PINS, used=used, more=more))
    assert told == (
        f"tenant 'red' has {used} blocks pinned; {more} more exceed its quota of 8 (pins): let some go, or have the operator raise it"
    )


def test_what_others_may_have_left_names_the_share_and_the_whole() -> None:
    told = str(Share(2, 8).exceeded("red", RESERVATIONS, used=1, more=2))
    assert told == (
        "tenant 'red' has 1 puts granted and not published in one partition of the key space; 2 more exceed what that has now, 2, of its "
        "quota of 8 (reservations), which others have the rest of: put fewer at once, in any of them, try again, or have the operator "
        "raise it"
    )


def test_who_has_no_such_limit_has_no_share() -> None:
    assert unshared("red", PINS) is None
