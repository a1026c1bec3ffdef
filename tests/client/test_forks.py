"""A forked child is told from its parent, and a child of its own from both."""

import os

from kvstore.client.forks import Process
from tests.forks import told_by_child


def told_and_child() -> list[str]:
    return [str(Process.number), told_by_child(lambda: Process.number)]


def test_each_child_has_a_number_of_its_own_line() -> None:
    before, parent = Process.number, os.getpid()
    assert told_by_child(lambda: (Process.number, os.getpid() != parent)) == f"{(before + 1, True)}"
    assert told_by_child(told_and_child) == f"{[str(before + 1), str(before + 2)]}"
    assert Process.number == before
