"""Promises of running.py."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import operations
from kvstore.rpc.address import is_here
from tests.system.running import System

THREADS = 4
CLIENTS = 100


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads take turns as often as may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_make_clients_that_are_here_and_elsewhere_and_leave_no_other_for_elsewhere(tmp_path: Path, eager: None) -> None:
    system = System(tmp_path)
    told: list[tuple[bool, bool]] = []

    def make(number: int) -> None:
        for _ in range(CLIENTS):
            is_far = bool(number % 2)
            with system.remote_client() if is_far else system.client() as client:
                told.append((is_far, client._operations.resources.daemons.nodes._is_here is not is_here))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [(False, False)] * (CLIENTS * THREADS // 2) + [(True, True)] * (CLIENTS * THREADS // 2)
    assert vars(operations)["is_here"] is is_here
