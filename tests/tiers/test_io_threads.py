"""Jobs of a batch are all done once, several at a time, and a batch ends while another one has all threads."""

import threading
from functools import partial

from kvstore.tiers.value_store import IoThreads
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background


def test_all_jobs_are_done_once() -> None:
    threads = IoThreads(3)
    for count in (0, 1, 2, 50):
        done: list[int] = []
        threads.run([partial(done.append, number) for number in range(count)])
        assert sorted(done) == list(range(count))
    threads.close()


def test_jobs_are_done_at_once() -> None:
    """Each waits for all others."""
    threads = IoThreads(3)
    together = threading.Barrier(4)

    def wait() -> None:
        together.wait(PATIENCE_S)

    in_background(lambda: threads.run([wait] * 4)).result(PATIENCE_S)
    assert not together.broken
    threads.close()


def test_a_batch_ends_while_another_one_has_all_threads() -> None:
    threads = IoThreads(1)
    is_over, busy = threading.Event(), threading.Barrier(3)

    def wait() -> None:
        busy.wait(PATIENCE_S)
        is_over.wait(PATIENCE_S)

    other = in_background(lambda: threads.run([wait, wait]))
    busy.wait(PATIENCE_S)
    done: list[int] = []
    threads.run([partial(done.append, number) for number in range(5)])
    assert done == list(range(5))
    is_over.set()
    other.result(PATIENCE_S)
    threads.close()
