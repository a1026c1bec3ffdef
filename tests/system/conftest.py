"""Fixtures of the tests with real processes."""

from tests.system.running import system

__all__ = ["system"]
