"""Fixtures of the tests of faults."""

from tests.system.running import system

__all__ = ["system"]
