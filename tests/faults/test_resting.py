"""When a site counts as at rest."""

from tests.faults.judging import Times
from tests.faults.resting import Rest, unprovoked


def test_it_is_disturbed_from_the_last_look_that_found_it_at_rest_until_it_is_again() -> None:
    rest = Rest()
    for at, epoch in ((0, None), (10, 7), (20, 7), (30, None), (40, None), (50, 7), (60, 7)):
        rest.looked(at, at + 5, None if epoch is None else (epoch,))
    assert list(Times(rest.disturbed)) == [(20, 45)]


def test_another_owner_is_a_disturbance_though_each_look_found_one() -> None:
    rest = Rest()
    for at, epochs in ((10, (1, 7)), (20, (1, 7)), (30, (1, 8)), (40, (1, 8)), (50, None), (60, (2, 8)), (70, (2, 8))):
        rest.looked(at, at + 5, epochs)
    assert list(Times(rest.disturbed)) == [(20, 35), (40, 65)]


def test_what_nobody_made_is_counted_once_each() -> None:
    disturbed = [(20, 35), (30, 45), (60, 65), (80, 90)]
    assert unprovoked(disturbed, [(0, 5), (62, 63)]) == 2
    assert unprovoked(disturbed, []) == 3
