"""vLLM's own offloading, with the store below its host memory: chunks outlive the engine that computed them."""

from pathlib import Path
from typing import Any

from kvstore.testing.transfer.waiting import eventually
from tests.client.processes import cluster
from tests.engines.live.pages import MASTER, configuration
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, prompt

BLOCKS = 5


def offloading(master: str) -> dict[str, Any]:
    """As docs/engines.md has it, but for the worker, which vLLM has for GPUs only, and for the size."""
    transfer = configuration("KVStoreTier", changes={MASTER: master})
    worker = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.live.vllm.cpu_tiering", "cpu_bytes_to_use": 64 << 20}
    transfer["kv_connector_extra_config"].update(worker)
    transfer["kv_connector_extra_config"]["secondary_tiers"][0] |= PATIENT
    return transfer


def test_chunks_that_one_engine_offloaded_another_loads(model: Path, plain: Engine, tmp_path: Path) -> None:
    asked = prompt(90, BLOCKS)
    plain.forget()
    (right,) = plain.generate(asked)
    with cluster(tmp_path) as store:
        store.start_node("--dram", "64MiB")
        with Engine(model, transfer=offloading(store.address)) as first, store.control() as control:
            (cold,) = first.generate(asked)
            cold.check_same(right)
            assert cold.cached == 0
            eventually(lambda: sum(node.blocks for node in control.status().nodes) == BLOCKS, "the chunks are in the store")
        with Engine(model, transfer=offloading(store.address)) as second:
            (warm,) = second.generate(asked)
            warm.check_same(right)
            assert warm.cached == BLOCKS * BLOCK_TOKENS
