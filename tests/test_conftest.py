"""What conftest.py promises of every test."""

import gc

import pytest
from hypothesis import settings

from tests.conftest import pytest_collection_finish


@pytest.mark.parametrize("profile", ["suite", "search"])
def test_no_example_has_a_time_limit(profile: str) -> None:
    """A machine that does something else takes longer than Hypothesis' 200 ms."""
    assert settings.get_profile(profile).deadline is None


def test_every_test_has_a_profile_without_one() -> None:
    assert settings().deadline is None


def test_garbage_of_tests_is_collected_and_nothing_else_is_looked_through() -> None:
    assert gc.isenabled()
    gc.unfreeze()  # as a master that stood in this process may have done (master/roles/standing.py)
    pytest_collection_finish()
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
