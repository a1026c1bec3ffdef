"""The mapping keeps and evicts what the paper's algorithm does over a plain list."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.streams.sieve import Sieve

KEYS = st.integers(0, 7)


class NaiveSieve:
    """The pseudo-code of the paper over a list: `keys` from the head (newest) to the tail; `hand` is None before the tail."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def insert(self, key: int) -> None:
        self.keys.insert(0, key)

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self.previous(key)
        self.keys.remove(key)
        self.visited.discard(key)

    def previous(self, key: int) -> int | None:
        place = self.keys.index(key)
        return self.keys[place - 1] if place else None

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        for _ in range(2 * len(self.keys)):
            self.hand = self.keys[-1] if self.hand is None else self.hand
            if self.hand not in self.visited | refused:
                return self.hand
            self.visited.discard(self.hand)
            self.hand = self.previous(self.hand)
        return None

    def access(self, key: int, capacity: int) -> bool:
        """Whether it is a hit in a cache of `capacity`; a miss brings it in."""
        if key in self.keys:
            self.visited.add(key)
            return True
        if len(self.keys) == capacity:
            victim = self.victim()
            assert victim is not None
            self.remove(victim)
        self.insert(key)
        return False


class AgainstNaive(RuleBasedStateMachine):
    """Under any calls the mapping holds what a dict holds, and its victims are those of the naive algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.sieve: Sieve[int, str] = Sieve()
        self.naive = NaiveSieve()
        self.values: dict[int, str] = {}

    @rule(key=KEYS, value=st.text(max_size=2))
    def insert(self, key: int, value: str) -> None:
        if key in self.values:
            with pytest.raises(InvalidArgument):
                self.sieve.insert(key, value)
            return
        self.sieve.insert(key, value)
        self.naive.insert(key)
        self.values[key] = value

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        assert self.sieve.get(key) == self.values.get(key)
        if key in self.values:
            self.naive.visited.add(key)

    @rule(key=KEYS)
    def peek(self, key: int) -> None:
        assert self.sieve.peek(key) == self.values.get(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.sieve.remove(key) == self.values.pop(key, None)
        if key in self.naive.keys:
            self.naive.remove(key)

    @precondition(lambda self: self.values)
    @rule(refused=st.frozensets(KEYS), evicts=st.booleans())
    def victim(self, refused: frozenset[int], evicts: bool) -> None:
        key = self.naive.victim(refused)
        expected = None if key is None else (key, self.values[key])
        assert self.sieve.victim(lambda key, value: key not in refused and self.values[key] == value) == expected
        if evicts and key is not None:
            self.remove(key)

    @invariant()
    def holds_what_the_dict_holds_in_the_order_of_arrival(self) -> None:
        self.sieve.check_integrity()
        assert list(self.sieve.items()) == [(key, self.values[key]) for key in reversed(self.naive.keys)]
        assert len(self.sieve) == len(self.values)
        assert all((key in self.sieve) == (key in self.values) for key in range(8))


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=100, stateful_step_count=50)


def sieve_of(keys: str) -> Sieve[str, int]:
    """Keys in the order of arrival, each with its place as value."""
    sieve: Sieve[str, int] = Sieve()
    for value, key in enumerate(keys):
        sieve.insert(key, value)
    return sieve


def evict(sieve: Sieve[str, int], count: int) -> str:
    """The keys of `count` victims, each removed."""
    keys = ""
    for _ in range(count):
        found = sieve.victim()
        assert found is not None
        sieve.remove(found[0])
        keys += found[0]
    return keys


def test_without_visits_the_first_in_is_the_first_out() -> None:
    assert evict(sieve_of("abc"), 3) == "abc"


def test_one_visited_since_the_hand_passed_stays_for_another_round() -> None:
    sieve = sieve_of("abc")
    assert sieve.get("a") == 0
    assert evict(sieve, 3) == "bca"


def test_a_peek_is_no_visit() -> None:
    sieve = sieve_of("abc")
    assert sieve.peek("a") == 0
    assert evict(sieve, 1) == "a"


def test_the_hand_goes_on_where_it_was_and_new_ones_wait_for_it() -> None:
    sieve = sieve_of("abcd")
    sieve.get("a")
    assert evict(sieve, 1) == "b"
    sieve.insert("e", 9)
    assert evict(sieve, 4) == "cdea"


def test_a_refused_one_keeps_its_place_and_is_passed_over() -> None:
    sieve = sieve_of("abc")
    assert sieve.victim(lambda key, value: key != "a" and value < 2) == ("b", 1)
    assert [key for key, _ in sieve.items()] == ["a", "b", "c"]
    assert evict(sieve, 3) == "bca"


def test_a_victim_stays_until_it_is_removed() -> None:
    sieve = sieve_of("abc")
    assert sieve.victim() == sieve.victim() == ("a", 0)
    assert len(sieve) == 3


@pytest.mark.parametrize("visited", ["", "abc"])
def test_when_all_are_refused_each_is_looked_at_twice_at_most(visited: str) -> None:
    sieve = sieve_of("abc")
    for key in visited:
        sieve.get(key)
    looks: list[str] = []
    assert sieve.victim(lambda key, value: bool(looks.append(key))) is None  # type: ignore[func-returns-value]
    assert len(looks) <= 6


def test_an_empty_one_has_no_victim() -> None:
    assert Sieve[str, int]().victim() is None


def test_a_second_insert_is_misuse_and_changes_nothing() -> None:
    sieve = sieve_of("ab")
    with pytest.raises(InvalidArgument, match="'a' is present: remove it"):
        sieve.insert("a", 7)
    assert list(sieve.items()) == [("a", 0), ("b", 1)]
    assert evict(sieve, 1) == "a"
