"""Tests of quorum.py: versions of etcd with known data bugs."""

import pytest

from kvstore.master.catalogs.etcd.quorum import known_data_bug, warn_of_data_bug


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.4.23", "stale reads after a pause; use 3.4.42 or later"),
        ("3.5.2", "can corrupt its data; use 3.5.28 or later"),
        ("3.5.3", "stale reads"),
        ("3.6.0-rc.1", "stale reads after a pause; use 3.6.9"),
        ("3.3.27", "no longer maintained"),
        ("Not provided", "is not known"),
    ],
)
def test_a_version_with_a_data_bug_is_named_with_the_one_to_use(version: str, said: str) -> None:
    warning = known_data_bug(version)
    assert warning is not None
    assert version in warning
    assert said in warning


def test_only_a_bad_version_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_data_bug("3.6.9")
    assert caplog.records == []
    warn_of_data_bug("3.5.0")
    assert "can corrupt its data" in caplog.text
