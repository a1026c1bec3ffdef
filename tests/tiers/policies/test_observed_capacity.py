"""The capacity is the most keys there were when room was needed, and follows a group that shrinks."""

from kvstore.tiers.policies.interface import ObservedCapacity


def test_it_is_unknown_until_a_victim_is_asked_for_and_rises_at_once() -> None:
    capacity = ObservedCapacity()
    assert capacity.keys == 0
    assert capacity.observe(10) == 10
    assert capacity.observe(12) == 12
    assert capacity.keys == 12


def test_a_batch_that_makes_its_room_first_does_not_lower_it() -> None:
    capacity = ObservedCapacity()
    for _ in range(5):
        for count in range(10, 0, -1):
            assert capacity.observe(count) == 10


def test_it_falls_to_what_was_seen_lately_once_that_lasts() -> None:
    capacity = ObservedCapacity()
    capacity.observe(10)
    assert [capacity.observe(6 + index % 2) for index in range(10)] == [10] * 10
    assert capacity.observe(5) == 7
    assert [capacity.observe(3) for _ in range(8)] == [7] * 7 + [3]
