"""vLLM's OpenAI server, with its scheduler and its worker in processes of their own."""

import contextlib
from pathlib import Path

from kvstore.client import Client
from kvstore.testing.transfer.waiting import eventually
from tests.client.processes import Cluster
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, prompt
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


def test_servers_and_engines_take_from_one_another(model: Path, store: Cluster, plain: Engine, waiting: Engine, loading: Engine) -> None:
    to_server, from_server = prompt(80, BLOCKS), prompt(81, BLOCKS)
    plain.forget()
    right_to, right_from = plain.generate(to_server, from_server)
    waiting.generate(to_server)
    waiting.flush()
    keys = [bytes.fromhex(key) for key in waiting.tell("keys", prompt=from_server, block_tokens=BLOCK_TOKENS)]
    with contextlib.closing(Server(model, store.address)) as server, Client(store.address) as client:
        server.wait()
        warm = server.complete(to_server)
        warm.check_same(right_to)
        assert warm.cached == BLOCKS * BLOCK_TOKENS
        server.complete(from_server).check_same(right_from)
        eventually(lambda: client.match_prefix(keys) == BLOCKS, "the server's blocks are in the store")
        eventually(lambda: server.metric("vllm:kvstore_saved_blocks_total") == BLOCKS, "the server counts them")
        counted = {name: server.metric(f"vllm:kvstore_{name}_total") for name in COUNTED}
        assert counted == COUNTED
    (answer,) = loading.generate(from_server)
    answer.check_same(right_from)
    assert answer.cached == BLOCKS * BLOCK_TOKENS
