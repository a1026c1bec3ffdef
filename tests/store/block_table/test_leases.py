"""Tests of leases.py: every block of a lease is released exactly once, however the lease ends."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.block_table.leases import Leases
from tests.store.made import made

RED, BLUE = object(), object()


class Given:
    """Leases, and what they gave back."""

    def __init__(self) -> None:
        self.back: list[str] = []
        self.leases = Leases(lambda block: self.back.append(block.key.decode()))

    def grant(self, owner: object, names: str, until_ns: int) -> int:
        return self.leases.grant(owner, [made("red", name.encode(), 1, 1) for name in names], until_ns)


@pytest.fixture
def given_back() -> Given:
    return Given()


@pytest.mark.promise("slots-not-reused-early")
def test_a_lease_expires_at_its_time(given_back: Given) -> None:
    given_back.grant(RED, "b", 20)
    given_back.grant(RED, "a", 10)
    assert given_back.leases.expire(now_ns=9) == 0
    assert given_back.leases.expire(now_ns=10) == 1
    assert given_back.back == ["a"]
    assert given_back.leases.expire(now_ns=99) == 1


def test_an_owner_cannot_release_anothers_lease(given_back: Given) -> None:
    lease = given_back.grant(RED, "a", 10)
    given_back.leases.release(BLUE, lease)
    assert (given_back.back, len(given_back.leases)) == ([], 1)
    given_back.leases.release(RED, lease)
    assert given_back.back == ["a"]


@given(st.lists(st.tuples(st.sampled_from(["grant", "release", "forget", "expire"]), st.integers(0, 9)), max_size=60))
def test_leases_release_every_block_exactly_once(events: list[tuple[str, int]]) -> None:
    back: Counter[bytes] = Counter()
    leases = Leases(lambda block: back.update([block.key]))
    granted = 0
    for event, number in events:
        owner = (RED, BLUE)[number % 2]
        match event:
            case "grant":
                leases.grant(owner, [made("red", bytes([granted]), 1, 1)], number)
                granted += 1
            case "release":
                leases.release(owner, number)
            case "forget":
                leases.forget_owner(owner)
            case _:
                leases.expire(now_ns=number)
    assert sum(back.values()) == granted - len(leases)
    leases.forget_owner(RED)
    leases.forget_owner(BLUE)
    assert set(back.values()) <= {1}
    assert len(back) == granted
