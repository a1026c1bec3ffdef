"""Tests of time_slices.py."""

from collections import deque
from collections.abc import Callable, Sequence

from kvstore.master.server.time_slices import TimeSlicer
from tests.garbage import assert_no_garbage


def run(slices: Sequence[Sequence[bytes]], wanted: Callable[[], bool] = lambda: True) -> tuple[list[list[bytes]], list[int]]:
    """The processed slices, and the result."""
    queue: deque[Callable[[], None]] = deque()
    worked: list[list[bytes]] = []
    told: list[int] = []

    def work(keys: Sequence[bytes], done: Callable[[int], None]) -> None:
        worked.append(list(keys))
        queue.append(lambda: done(len(keys)))

    TimeSlicer(queue.append, wanted).of(iter(slices), work, told.append)
    while queue:
        queue.popleft()()
    return worked, told


def test_slices_run_in_separate_loop_calls_and_add_up() -> None:
    assert run([[b"a", b"b"], [], [b"c"]]) == ([[b"a", b"b"], [b"c"]], [3])
    assert run([]) == ([], [0])


def test_no_slice_is_begun_that_nobody_wants() -> None:
    left = iter([True, False])
    assert run([[b"a"], [b"b"]], lambda: next(left)) == ([[b"a"]], [1])


def test_work_that_is_done_leaves_nothing_to_the_collector() -> None:
    def work() -> None:
        assert run([[b"a"], [], [b"b"]])[1] == [2]

    assert_no_garbage(work)
