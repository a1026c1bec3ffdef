"""SGLang's own HiCache back end for Mooncake, unmodified, on kvstore under Mooncake's name: the tests that SGLang ships with it."""

import os
import subprocess
from pathlib import Path

from tests.client.processes import cluster
from tests.engines.live.environments import python_of
from tests.engines.live.mooncake.package import install
from tests.engines.live.sglang.hicache import CPU

TESTS = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"


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
