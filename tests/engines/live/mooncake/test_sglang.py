"""SGLang's own HiCache back end for Mooncake, unmodified, on kvstore under Mooncake's name: the tests that SGLang ships with it, and
whole engines as docs/engines.md starts them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.transfer.waiting import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.mooncake.package import install
from tests.engines.live.pages import MASTER, command
from tests.engines.live.sglang.engines import PAGE, Engine, prompt
from tests.engines.live.sglang.hicache import CPU

TESTS = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
PAGES = 24
"""More tokens than SGLang's prefetch_threshold of 256."""


def test_the_back_ends_own_tests_pass(tmp_path: Path) -> None:
    """Keys and pages of several ranks, with and without MLA: what is set is there, and is got as it was."""
    with cluster(tmp_path) as started:
        started.start_node("--dram", "256MiB")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(CPU), install(tmp_path)]),
            "MOONCAKE_MASTER": started.address,
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_PROTOCOL": "tcp",
        }
        command = [str(python_of("sglang")), "-m", TESTS]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    assert "All tests passed" in found.stderr


def documented(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Set the environment of the documented command. Return its flags as options of an engine."""
    words = command(f"MOONCAKE_MASTER={MASTER}", changes={MASTER: started.address})
    for word in words[: words.index("python")]:
        monkeypatch.setenv(*word.split("=", 1))
    flags = words[words.index("sglang.launch_server") + 1 :]
    names = [(name, value) for name, value in zip(flags, [*flags[1:], "--"], strict=True) if name.startswith("--")]
    return {name[2:].replace("-", "_"): True if value.startswith("--") else value for name, value in names if name != "--model-path"}


def test_prefix_of_one_engine_is_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start as documented, with SGLang's question for the master's segments; the second one's prefix comes from the store."""
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", tmp_path / "model", "tiny"], cwd=ROOT, check=True)
    with cluster(tmp_path, "--http", "127.0.0.1:0") as started:
        started.start_node("--dram", "128MiB")
        options = documented(started, monkeypatch)
        monkeypatch.setenv("PYTHONPATH", install(tmp_path))
        monkeypatch.setenv("MOONCAKE_CHECK_SERVER", "1")
        monkeypatch.setenv("MOONCAKE_MASTER_METRICS_PORT", started.master.ready["http"].rpartition(":")[2])
        asked = prompt(1, PAGES)
        with Engine(tmp_path / "model", **options) as first:
            (cold,) = first.generate(asked)
            with started.control() as control:
                eventually(lambda: len(list(control.keys("mooncake"))) >= PAGES, "the back end has put the prompt's pages")
        with Engine(tmp_path / "model", **options) as second:
            (warm,) = second.generate(asked)
    warm.check_same(cold)
    assert (cold.cached, warm.cached) == (0, PAGES * PAGE)
