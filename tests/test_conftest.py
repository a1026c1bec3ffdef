"""What conftest.py promises of every test."""

import pytest
from hypothesis import settings


@pytest.mark.parametrize("profile", ["suite", "search"])
def test_no_example_has_a_time_limit(profile: str) -> None:
    """A machine that does something else takes longer than Hypothesis' 200 ms."""
    assert settings.get_profile(profile).deadline is None


def test_every_test_has_a_profile_without_one() -> None:
    assert settings().deadline is None
