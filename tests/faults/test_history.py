"""The checker itself: what it lets pass and what it does not."""

import pytest

from tests.faults.history import (
    Described,
    History,
    Told,
    Version,
    Violation,
    described,
    describing_value,
    smallest_bytes,
)

TENANT, KEY = "red", b"key"


@pytest.fixture
def history() -> History:
    return History()


def put(history: History, at: int, *, ack: str = "cluster", told: Told = Told.STORED, writer: int = 1) -> Version:
    """A put that takes from `at` to `at` + 5."""
    version = history.begin_put(TENANT, KEY, writer=writer, ack=ack, size_bytes=100, at=at)
    history.end_put(version, told, at=at + 5)
    return version


def remove(history: History, at: int, *, is_gone: bool = True, writer: int = 2) -> None:
    """From `at` to `at` + 5."""
    history.end_remove(history.begin_remove(TENANT, KEY, writer=writer, at=at), is_gone=is_gone, at=at + 5)


def test_a_value_says_whose_it_is_in_as_few_bytes_as_it_says_and_in_any_more() -> None:
    least = smallest_bytes(TENANT, KEY)
    for size in (least, least + 1, 1000):
        value = describing_value(TENANT, KEY, 3, 7, size)
        assert len(value) == size
        assert described(value) == Described(TENANT, KEY, 3, 7)
    with pytest.raises(AssertionError, match="cannot describe itself"):
        describing_value(TENANT, KEY, 3, 7, least - 1)


@pytest.mark.parametrize("position", [0, 4, 30, 60, 99])
def test_a_damaged_value_is_nobodys(position: int) -> None:
    value = bytearray(describing_value(TENANT, KEY, 3, 7, 100))
    value[position] ^= 1
    with pytest.raises(Violation, match="bytes that nobody put"):
        described(bytes(value))


@pytest.mark.parametrize("value", [b"", b"short", describing_value(TENANT, KEY, 3, 7, 100)[:-1]])
def test_a_value_that_was_cut_is_nobodys(value: bytes) -> None:
    with pytest.raises(Violation, match="bytes that nobody put"):
        described(value)


def test_a_version_may_be_read_from_the_start_of_its_put_and_none_that_was_never_put(history: History) -> None:
    with pytest.raises(Violation, match="never put"):
        history.check_read(TENANT, KEY, describing_value(TENANT, KEY, 0, 1, 100), begun_at=0)
    version = history.begin_put(TENANT, KEY, writer=1, ack="node", size_bytes=100, at=1)
    assert history.check_read(TENANT, KEY, version.value, begun_at=0) is version
    with pytest.raises(Violation, match="never put"):
        history.check_read(TENANT, KEY, describing_value(TENANT, KEY, 0, 9, 100), begun_at=2)


def test_what_is_anothers_is_told_as_such(history: History) -> None:
    put(history, 1)
    with pytest.raises(Violation, match="another tenant's bytes"):
        history.check_read(TENANT, KEY, describing_value("blue", KEY, 0, 1, 100), begun_at=9)
    with pytest.raises(Violation, match="another key's bytes"):
        history.check_read(TENANT, KEY, describing_value(TENANT, b"other", 0, 1, 100), begun_at=9)


def test_a_removed_version_may_be_read_only_by_a_get_that_began_before_the_removal_ended(history: History) -> None:
    version = put(history, 1)
    remove(history, 10)
    history.check_read(TENANT, KEY, version.value, begun_at=14)
    with pytest.raises(Violation, match="was over at 15"):
        history.check_read(TENANT, KEY, version.value, begun_at=15)
    assert not version.is_acknowledged
    assert history.may_be_removed(version)


def test_a_removal_that_found_nothing_says_nothing(history: History) -> None:
    version = put(history, 1)
    remove(history, 10, is_gone=False)
    history.check_read(TENANT, KEY, version.value, begun_at=20)
    assert version.is_acknowledged
    assert history.may_be_removed(version)


@pytest.mark.parametrize("told", [Told.FAILED, Told.PRESENT])
def test_what_may_take_effect_later_outlives_a_removal(history: History, told: Told) -> None:
    version = put(history, 1, told=told)
    remove(history, 10)
    history.check_read(TENANT, KEY, version.value, begun_at=20)


def test_a_put_that_overlaps_a_removal_outlives_it(history: History) -> None:
    version = put(history, 8)
    remove(history, 10)
    history.check_read(TENANT, KEY, version.value, begun_at=20)


def test_what_only_its_node_knows_is_removed_by_its_own_writer_or_once_it_is_flushed(history: History) -> None:
    version = put(history, 1, ack="node", writer=1)
    remove(history, 10, writer=2)
    history.check_read(TENANT, KEY, version.value, begun_at=20)
    history.flushed(3, begun_at=20, at=20)
    remove(history, 22, writer=2)
    history.check_read(TENANT, KEY, version.value, begun_at=30)
    history.flushed(1, begun_at=30, at=30)
    assert version.is_acknowledged
    remove(history, 32, writer=2)
    with pytest.raises(Violation, match="stale version"):
        history.check_read(TENANT, KEY, version.value, begun_at=40)
    own = put(history, 41, ack="node", writer=1)
    remove(history, 50, writer=1)
    with pytest.raises(Violation, match="stale version"):
        history.check_read(TENANT, KEY, own.value, begun_at=60)


def test_a_flush_tells_of_what_was_stored_before_it_began(history: History) -> None:
    early, late = put(history, 1, ack="node"), put(history, 10, ack="node")
    known = put(history, 2, ack="cluster")
    history.flushed(1, begun_at=12, at=12)
    assert (early.is_acknowledged, late.is_acknowledged, known.known_at) == (True, False, 7)


def test_what_a_flush_told_to_be_lost_no_later_one_makes_known(history: History) -> None:
    lost, known = put(history, 1, ack="node"), put(history, 2, ack="cluster")
    history.flush_told_loss(1, begun_at=10)
    later = put(history, 12, ack="node")
    history.flushed(1, begun_at=20, at=20)
    assert (lost.is_acknowledged, known.is_acknowledged, later.is_acknowledged) == (False, True, True)


def test_all_that_was_put_can_be_listed(history: History) -> None:
    version = put(history, 1)
    assert history.places() == [(TENANT, KEY)]
    assert history.of(TENANT, KEY) == [version] == list(history.versions())
    assert (history.of("blue", KEY), history.may_be_removed(version), history.rivals(version)) == ([], False, [])
    assert "version 0 of red/6b6579" in str(version)


def test_a_removal_that_was_over_before_a_put_began_cannot_have_removed_what_was_put(history: History) -> None:
    put(history, 1)
    remove(history, 10)
    version = put(history, 16)
    assert not history.may_be_removed(version)
    history.begin_remove(TENANT, KEY, writer=2, at=30)
    assert history.may_be_removed(version), "nobody knows when it is carried out"


def test_a_version_has_no_rivals_in_those_that_were_over_before_its_put_began(history: History) -> None:
    former, failed = put(history, 1), put(history, 2, told=Told.FAILED)
    put(history, 3, told=Told.PRESENT)
    remove(history, 10)
    version = put(history, 16)
    assert history.rivals(version) == [failed], "it may be stored any time"
    assert history.rivals(former) == [failed, version]


def test_a_removal_while_a_node_was_away_ends_what_all_knew_and_not_what_perhaps_that_node_alone_did(history: History) -> None:
    known, early = put(history, 10), put(history, 20, ack="node", writer=2)
    history.end_remove(history.begin_remove(TENANT, KEY, writer=2, at=30), is_gone=True, at=35, nodes_were_away=True)
    assert (known.over_at, early.over_at) == (35, None)
    history.end_remove(history.begin_remove(TENANT, KEY, writer=2, at=40), is_gone=True, at=45)
    assert early.over_at == 45


def test_what_a_flush_makes_known_is_known_once_it_has_ended_and_not_when_it_began() -> None:
    """A removal that is told of later, for a node was away, began and ended while the flush was under way."""
    history = History()
    early = history.begin_put("red", b"k", writer=1, ack="node", size_bytes=60, at=1)
    history.end_put(early, Told.STORED, at=2)
    removal = history.begin_remove("red", b"k", writer=2, at=5)
    history.flushed(1, begun_at=3, at=7)
    history.end_remove(removal, is_gone=True, at=9, nodes_were_away=True)
    assert history.check_read("red", b"k", early.value, begun_at=10) is early
    after = history.begin_remove("red", b"k", writer=2, at=11)
    history.end_remove(after, is_gone=True, at=12)
    with pytest.raises(Violation, match="stale version"):
        history.check_read("red", b"k", early.value, begun_at=13)
