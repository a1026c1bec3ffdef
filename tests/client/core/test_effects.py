"""Promises of effects.py: an operation is driven by what carries out its effects, and is over when the driver is."""

from typing import Any

import pytest

from kvstore.client.core.effects import Effect, SleepEffect, drive


def test_drive_closes_an_interrupted_operation() -> None:
    """A signal handler may raise between any two instructions, also where the operation waits for nothing."""
    closed: list[bool] = []

    class Interrupted(Exception):
        pass

    class Operations:
        """A generator that is interrupted as a result is sent in, and stays suspended."""

        def __next__(self) -> Effect:
            return SleepEffect(0.0)

        def send(self, result: Any) -> Effect:
            raise Interrupted

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(Interrupted):
        drive(Operations(), lambda effect: None)  # type: ignore[arg-type]
    assert closed == [True]
