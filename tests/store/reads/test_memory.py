"""Promises of memory.py, in a process of its own: what was freed is the system's again, where the C library can give it back."""

import ctypes
import subprocess
import sys

import pytest

from kvstore.store.reads import turns as memory

PROGRAM = """
import numpy
from pathlib import Path
from kvstore.store.reads.turns import trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kept = [numpy.ones(100_000, numpy.uint8) for _ in range(1000)]
full = resident_bytes()
del kept[:-1]  # the last one lies above the others: malloc keeps all of them
trim_heap()
assert full - resident_bytes() > 80_000_000, (full, resident_bytes())
"""


def test_what_was_freed_goes_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_where_the_c_library_cannot_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    memory.trim_heap()
