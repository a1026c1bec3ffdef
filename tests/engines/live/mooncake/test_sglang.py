"""SGLang's own use of Mooncake, unmodified, on kvstore under Mooncake's name.

- the tests that SGLang ships with its HiCache back end
- whole engines as docs/engines.md starts them
- prefill and decode over `mooncake.engine`: the decode engine continues from KV that the prefill engine wrote into its memory
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import python_of
from tests.engines.live.mooncake.package import install
from tests.engines.live.pages import MASTER, command
from tests.engines.live.sglang.engines import PAGE, Engine, prompt
from tests.engines.live.sglang.hicache import CPU
from tests.ports import free_ports

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


def test_prefix_of_one_engine_is_anothers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start as documented, with SGLang's question for the master's segments; the second one's prefix comes from the store."""
    with cluster(tmp_path, "--http", "127.0.0.1:0") as started:
        started.start_node("--dram", "128MiB")
        options = documented(started, monkeypatch)
        monkeypatch.setenv("PYTHONPATH", install(tmp_path))
        monkeypatch.setenv("MOONCAKE_CHECK_SERVER", "1")
        monkeypatch.setenv("MOONCAKE_MASTER_METRICS_PORT", started.master.ready["http"].rpartition(":")[2])
        asked = prompt(1, PAGES)
        with Engine(model, **options) as first:
            (cold,) = first.generate(asked)
            with started.control() as control:
                eventually(lambda: len(list(control.keys("mooncake"))) >= PAGES, "the back end has put the prompt's pages")
        with Engine(model, **options) as second:
            (warm,) = second.generate(asked)
    warm.check_same(cold)
    assert (cold.cached, warm.cached) == (0, PAGES * PAGE)


HOST = "127.0.0.1"
ROOMS = [1, 2]


def test_decode_continues_from_kv_of_prefill(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of an engine that computed the prompts itself."""
    monkeypatch.setenv("PYTHONPATH", install(tmp_path))
    for name, value in {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "SGLANG_HOST_IP": HOST}.items():
        monkeypatch.setenv(name, value)
    [port] = free_ports(1)
    plain: dict[str, Any] = {"enable_hierarchical_cache": False}
    apart = plain | {"disaggregation_transfer_backend": "mooncake", "disaggregation_bootstrap_port": port}
    bootstrap = {"bootstrap_host": [HOST] * 2, "bootstrap_port": [port] * 2, "bootstrap_room": ROOMS}
    asked = prompt(1), prompt(2)
    with (
        Engine(model, **plain) as whole,
        Engine(model, disaggregation_mode="prefill", **apart) as prefill,
        Engine(model, disaggregation_mode="decode", **apart) as decode,
    ):
        prefill.begin(*asked, bootstrap=bootstrap)
        decoded = decode.generate(*asked, bootstrap=bootstrap)
        prefill.answers()
        assert [one.tokens for one in decoded] == [one.tokens for one in whole.generate(*asked)]
