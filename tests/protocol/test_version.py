"""Promises of version.py."""

from importlib.metadata import version

from kvstore.protocol.extras import DISTRIBUTION
from kvstore.protocol.version import VERSION


def test_it_is_the_distributions() -> None:
    assert version(DISTRIBUTION) == VERSION
