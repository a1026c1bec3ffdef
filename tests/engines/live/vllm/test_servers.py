"""vLLM's OpenAI server, with its scheduler and its worker in processes of their own; and its own offloading, with the store below its host
memory: chunks outlive the engine that computed them."""

import contextlib
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.pages import MASTER, configuration
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, expected, prompt
from tests.engines.live.vllm.server import Server

BLOCKS = 5
COUNTED = {
    "lookups": 2,
    "requests": 2,
    "queried_tokens": 2 * BLOCKS * BLOCK_TOKENS,
    "found_tokens": BLOCKS * BLOCK_TOKENS,
    "loaded_tokens": BLOCKS * BLOCK_TOKENS,
    "loaded_blocks": BLOCKS,
    "failed_blocks": 0,
    "dropped_blocks": 0,
}
"""By a server that was given one prompt whose blocks the store had, and one other."""


def test_servers_and_engines_take_from_one_another(model: Path, store: Cluster, plain: Engine, first: Engine, second: Engine) -> None:
    to_server, from_server = prompt(80, BLOCKS), prompt(81, BLOCKS)
    right_to, right_from = expected(plain, to_server, from_server)
    first.save(to_server)
    keys = [bytes.fromhex(key) for key in first.tell("keys", prompt=from_server, block_tokens=BLOCK_TOKENS)]
    with contextlib.closing(Server(model, store.address)) as server, Client(store.address) as client:
        server.wait()
        server.complete(to_server).check_same(right_to, cached=BLOCKS * BLOCK_TOKENS)
        server.complete(from_server).check_same(right_from)
        eventually(lambda: client.match_prefix(keys) == BLOCKS, "the server's blocks are in the store")
        eventually(lambda: server.metric("vllm:kvstore_saved_blocks_total") == BLOCKS, "the server counts them")
        counted = {name: server.metric(f"vllm:kvstore_{name}_total") for name in COUNTED}
        assert counted == COUNTED
    second.generate(from_server)[0].check_same(right_from, cached=BLOCKS * BLOCK_TOKENS)


def offloading(master: str) -> dict[str, Any]:
    """As docs/engines.md has it, but for the worker, which vLLM has for GPUs only, and for the size."""
    transfer = configuration("KVStoreTier", changes={MASTER: master})
    worker = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.live.vllm.cpu_tiering", "cpu_bytes_to_use": 64 << 20}
    transfer["kv_connector_extra_config"].update(worker)
    transfer["kv_connector_extra_config"]["secondary_tiers"][0] |= PATIENT
    return transfer


def test_chunks_that_one_engine_offloaded_another_loads(model: Path, plain: Engine, tmp_path: Path) -> None:
    asked = prompt(90, BLOCKS)
    (right,) = expected(plain, asked)
    with cluster(tmp_path) as store:
        store.start_node("--dram", "64MiB")
        with Engine(model, transfer=offloading(store.address)) as first, store.control() as control:
            first.generate(asked)[0].check_same(right, cached=0)
            eventually(lambda: sum(node.blocks for node in control.status().nodes) == BLOCKS, "the chunks are in the store")
        with Engine(model, transfer=offloading(store.address)) as second:
            second.generate(asked)[0].check_same(right, cached=BLOCKS * BLOCK_TOKENS)
