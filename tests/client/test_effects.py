"""Promises of effects.py: an operation is driven by what carries out its effects, and is over when the driver is."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client.effects import SMALL_WORK_BYTES, Effect, Operation, Sleep, Work, drive, work
from kvstore.protocol.errors import Unavailable


def test_each_effect_is_carried_out_in_order_and_its_result_sent_in() -> None:
    done: list[float] = []

    def do(effect: Effect) -> float:
        assert isinstance(effect, Sleep)
        done.append(effect.seconds)
        return effect.seconds * 2

    def operation() -> Operation[list[float]]:
        first: float = yield Sleep(1.0)
        second: float = yield Sleep(first + 1.0)
        return [first, second]

    assert drive(operation(), do) == [2.0, 6.0]
    assert done == [1.0, 3.0]


def test_an_operation_without_effects_asks_nobody() -> None:
    def operation() -> Operation[str]:
        return "at once"
        yield Sleep(0.0)

    assert drive(operation(), failing(AssertionError())) == "at once"


def failing(error: BaseException) -> Callable[[Effect], Any]:
    def do(effect: Effect) -> Any:
        raise error

    return do


def test_what_an_effect_raises_is_thrown_in_where_it_was_wanted() -> None:
    def operation() -> Operation[str]:
        try:
            yield Sleep(0.0)
        except Unavailable as error:
            return f"went on after: {error}"
        return "nothing was raised"

    assert drive(operation(), failing(Unavailable("nobody there"))) == "went on after: nobody there"


def test_what_an_operation_does_not_catch_is_raised() -> None:
    def operation() -> Operation[None]:
        yield Sleep(0.0)

    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        drive(operation(), failing(error))
    assert caught.value is error


def test_an_operation_is_closed_though_the_driver_is_interrupted_before_it_can_throw() -> None:
    """A signal handler may raise between any two instructions, also where the operation waits for nothing."""
    closed: list[bool] = []

    class Interrupted(Exception):
        pass

    class Operations:
        """A generator that is interrupted as a result is sent in, and stays suspended."""

        def __next__(self) -> Effect:
            return Sleep(0.0)

        def send(self, result: Any) -> Effect:
            raise Interrupted

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(Interrupted):
        drive(Operations(), lambda effect: None)  # type: ignore[arg-type]
    assert closed == [True]


@pytest.mark.parametrize(("size_bytes", "is_yielded"), [(SMALL_WORK_BYTES, False), (SMALL_WORK_BYTES + 1, True)])
def test_only_much_work_goes_to_the_driver(size_bytes: int, is_yielded: bool) -> None:
    asked: list[Effect] = []

    def do(effect: Effect) -> Any:
        asked.append(effect)
        assert isinstance(effect, Work)
        return effect.function()

    assert drive(work(lambda: "done", size_bytes), do) == "done"
    assert bool(asked) == is_yielded
