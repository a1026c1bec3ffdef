"""The checker itself: what it lets pass and what it does not."""

import pytest

from tests.system.history import History, value_of, version_of

KEY = b"key"


def test_a_value_tells_its_version_and_no_other_key_has_it() -> None:
    assert version_of(KEY, value_of(KEY, 3, 100)) == 3
    with pytest.raises(AssertionError, match="nobody put"):
        version_of(b"other", value_of(KEY, 3, 100))


@pytest.mark.parametrize("position", [0, 50, 99])
def test_a_damaged_value_is_refused(position: int) -> None:
    value = bytearray(value_of(KEY, 3, 100))
    value[position] ^= 1
    with pytest.raises(AssertionError, match="nobody put"):
        version_of(KEY, bytes(value))


def test_a_version_may_be_seen_from_the_start_of_its_put_and_none_before() -> None:
    history = History()
    with pytest.raises(AssertionError, match="never put"):
        history.check(KEY, value_of(KEY, 0, 100), history.now())
    history.begin_put(KEY)
    history.check(KEY, value_of(KEY, 0, 100), history.now())


def test_a_removed_version_may_be_seen_only_by_a_get_that_began_before() -> None:
    history = History()
    history.stored(KEY, history.begin_put(KEY))
    before = history.now()
    history.removed(KEY)
    history.check(KEY, value_of(KEY, 0, 100), before)
    with pytest.raises(AssertionError, match="was over"):
        history.check(KEY, value_of(KEY, 0, 100), history.now())


def test_a_later_version_that_was_stored_ends_the_earlier_ones() -> None:
    history = History()
    history.stored(KEY, history.begin_put(KEY))
    history.stored(KEY, history.begin_put(KEY))
    history.check(KEY, value_of(KEY, 1, 100), history.now())
    with pytest.raises(AssertionError, match="was over"):
        history.check(KEY, value_of(KEY, 0, 100), history.now())


def test_a_put_that_failed_may_take_effect_later() -> None:
    history = History()
    history.failed(KEY, history.begin_put(KEY))
    history.removed(KEY)
    history.check(KEY, value_of(KEY, 0, 100), history.now())
