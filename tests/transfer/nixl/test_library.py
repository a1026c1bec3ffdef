"""Promises of library.py; skipped where NIXL is not installed, except the tests of that error."""

import importlib
import logging
import os
import subprocess
import sys

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.transfer.agent import Rail
from kvstore.transfer.nixl.library import PACKAGES, NativeAgent, bindings

try:
    bindings()
    HAS_NIXL = True
except ConfigError:
    HAS_NIXL = False
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
PATIENCE_S = 30.0


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, f"{package}._bindings", None)
    with pytest.raises(ConfigError, match=r"\.\[nixl\]"):
        bindings()


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        bindings()


@needs_nixl
def test_loading_it_leaves_the_process_as_it_was() -> None:
    environment = dict(os.environ)
    NativeAgent("quiet", Rail()).close()
    assert dict(os.environ) == environment
    assert logging.raiseExceptions


@needs_nixl
def test_an_idle_agent_takes_next_to_no_processor_time() -> None:
    program = (
        "import time; from kvstore.transfer.agent import Rail; from kvstore.transfer.nixl.library import NativeAgent; "
        "kept = NativeAgent('a', Rail()); began = time.process_time(); time.sleep(0.5); print(time.process_time() - began)"
    )
    told = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=True, capture_output=True)
    assert float(told.stdout) < 0.1


@needs_nixl
def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere0"):
        NativeAgent("railed", Rail(device="nowhere0"))
