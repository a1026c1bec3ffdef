"""Promises of app.py: the engine's side of the protocol, with a real store and a real scheduler."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from kvstore.kvcache.namespace import Namespace
from kvstore.router.answer_reader import DONE, EventParser
from kvstore.router.config import RouterSettings
from kvstore.router.engines import Engines
from kvstore.router.fake_engine.app import DecodeApp, PrefillApp
from kvstore.router.fake_engine.blocks import BlockStore, PinnedNodeClient
from kvstore.router.fake_engine.compute import DecodeEngine, PrefillEngine, text_of
from tests.router.scripted import completion, following, placement

PROMPT = list(range(18))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": {}}


class Times:
    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return float(input_tokens - prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


@contextlib.asynccontextmanager
async def apps(cluster: LocalCluster, model: str, speedup: float = 1e6) -> AsyncIterator[tuple[web.Application, web.Application]]:
    """A prefill and a decode engine that share a store."""
    namespace = Namespace(model=model, dtype="bfloat16", block_tokens=4)
    fixed = InstanceReport(name=model, role=InstanceRole.PREFILL, address="http://nowhere")
    async with PinnedNodeClient(cluster.address, "node-0", tenant="", token="") as client:
        blocks = BlockStore(client, namespace, 64)
        with SchedulerClient(ClientSettings(master=cluster.address)) as scheduler, Reporter(scheduler, lambda: fixed) as reporter:
            decode = DecodeEngine(Times(), speedup=speedup, capacity_tokens=1000, on_step=lambda *_: None)
            prefill = PrefillEngine(Times(), blocks, namespace, speedup=speedup)
            yield PrefillApp("p", prefill, reporter).web, DecodeApp(decode, reporter, blocks, namespace).web


async def test_the_router_gets_from_both_what_it_asks_for(two_nodes: LocalCluster) -> None:
    async with apps(two_nodes, "both") as (prefill, decode), TestServer(prefill) as first, TestServer(decode) as second:
        engines = Engines(RouterSettings(model="both"))
        where = placement(str(first.make_url("/")), str(second.make_url("/")), prefix_blocks=0)
        asked = completion(PROMPT, max_tokens=6, stream=True)
        prefilled = await engines.prefill(asked, where)
        assert prefilled.params == {"do_remote_prefill": True, "do_remote_decode": False, "prefill": "p", "blocks": 4}
        answer = await engines.decode(asked, where, prefilled)
        pieces = [json.loads(data) for chunk in [c async for c in answer.chunks()] for data in EventParser().feed(chunk) if data != DONE]
        answer.close()
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text_of(following(PROMPT, 6))
        assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 5 + ["length"]
        await engines.close()


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"prompt": ["text"]}, 400, "a fake engine takes one prompt (a text or token ids), max_tokens and kv_transfer_params"),
        ({"prompt": []}, 400, "a fake engine takes one prompt"),
        ({"max_tokens": 0}, 400, "a fake engine takes one prompt"),
        ({"kv_transfer_params": None}, 400, "a fake engine takes one prompt"),
        ({"max_tokens": 1000}, 400, "1018 tokens do not fit: the cache holds 1000"),
        ({"kv_transfer_params": {"blocks": 4}}, 503, "blocks of the prompt were evicted from the store"),
    ],
)
async def test_what_a_decode_engine_cannot_do_is_an_error(
    two_nodes: LocalCluster, change: dict[str, Any], status: int, message: str
) -> None:
    async with apps(two_nodes, "errors") as (_, decode), TestClient(TestServer(decode)) as client:
        response = await client.post("/v1/completions", json={**BODY, **change})
        assert response.status == status
        assert (await response.json())["error"]["message"].startswith(message)
