"""Promises of tracing.py, with clients and engines on real sockets: whose part a request's span is, and what goes on to engines."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.traceparent import TraceParent
from kvstore.router.answer_reader import event
from kvstore.router.app import RouterApp
from kvstore.router.engines import Engines
from kvstore.router.metrics import RouterCounters
from kvstore.router.proxy import StreamingProxy
from kvstore.router.tokenizer import PromptTokenizer
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.spans import Tracing
from tests.router.scripted import (
    PROMPT,
    SETTINGS,
    Act,
    ScriptedEngine,
    ScriptedScheduler,
    choice,
    hangs_up,
    placement,
    streams,
    well,
)
from tests.telemetry.tracing.collector import Collector, collecting

PARENT = TraceParent(7, 11)
UNSAMPLED = PARENT.text()[:-1] + "0"
NAMING = NamespaceNaming(Namespace(model="m", dtype="bfloat16", block_tokens=4))
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
WHOLE = {"n": 2}
"""Makes one request of an engine of what would be two."""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def to(collector: Collector, *, sample_ratio: float = 0.0) -> Tracing:
    settings = TracingSettings(endpoint=collector.endpoint, sample_ratio=sample_ratio, flush_interval_s=0.01)
    return Tracing(settings, role="router", instance="r")


@asynccontextmanager
async def router(tracing: Tracing | None, *script: Act, fails: bool = False) -> AsyncIterator[tuple[TestClient, ScriptedEngine]]:  # type: ignore[type-arg]
    """One in front of an engine that prefills and decodes, on the one hand and on the other."""
    engines, counters = Engines(SETTINGS), RouterCounters()
    with ThreadPoolExecutor(2) as threads:
        async with ScriptedEngine(*script) as engine:
            scheduler = ScriptedScheduler(Unavailable("nobody") if fails else placement(engine.address, engine.address))
            proxy, tokenizer = StreamingProxy(scheduler, engines, SETTINGS, counters), PromptTokenizer(engines, NAMING, threads, counters)
            app = RouterApp(proxy, tokenizer, SETTINGS, counters, tracing)
            async with TestClient(TestServer(app.web)) as client:
                yield client, engine
            await engines.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def test_trace_request_span_is_child_of_header_and_parent(collector: Collector) -> None:
    async with router(to(collector)) as (client, engine):
        response = await client.post("/v1/completions", json=BODY, headers={"traceparent": PARENT.text(), "tracestate": "a=1"})
        assert response.status == 200
    spans = collector.spans(*(f"kvstore.router.{name}" for name in ("completions", "schedule", "prefill", "decode")))
    request = spans["kvstore.router.completions"]
    assert (request.service, request.trace_id, request.parent_id) == (
        "kvstore-router",
        f"{PARENT.trace_id:032x}",
        f"{PARENT.span_id:016x}",
    )
    assert request.attributes == {"kvstore.prompt_tokens": len(PROMPT), "kvstore.prefix_blocks": 2, "http.response.status_code": 200}
    for name in ("schedule", "prefill", "decode"):
        assert spans[f"kvstore.router.{name}"].parent_id == request.span_id
        assert spans[f"kvstore.router.{name}"].error == ""
    assert [spans[f"kvstore.router.{name}"].attributes for name in ("prefill", "decode")] == [
        {"kvstore.instance": "p"},
        {"kvstore.instance": "d"},
    ]
    told = [TraceParent(PARENT.trace_id, int(spans[f"kvstore.router.{name}"].span_id, 16)).text() for name in ("prefill", "decode")]
    assert [headers["traceparent"] for headers in engine.headers] == told
    assert [headers["tracestate"] for headers in engine.headers] == ["a=1", "a=1"]


@pytest.mark.parametrize("is_tracing", [False, True])
async def test_trace_unsampled_header_is_passed_invalid_dropped(collector: Collector, is_tracing: bool) -> None:
    async with router(to(collector) if is_tracing else None) as (client, engine):
        for traceparent in (UNSAMPLED, "garbage"):
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/completions", json={**BODY, **WHOLE}, headers={"traceparent": traceparent})
        await client.get("/health", headers={"traceparent": PARENT.text()})
    assert [headers.get("traceparent") for headers in engine.headers] == [None, UNSAMPLED, None, None]
    assert collector.all() == []


async def test_chance_begins_traces_of_requests_that_name_none(collector: Collector) -> None:
    async with router(to(collector, sample_ratio=1)) as (client, engine):
        await client.post("/v1/completions", json={**BODY, **WHOLE}, headers={"traceparent": UNSAMPLED})
        await client.post("/v1/completions", json={**BODY, **WHOLE}, headers={"traceparent": "garbage"})
    (request,) = collector.named("kvstore.router.completions", 1)
    assert request.parent_id == ""
    assert engine.headers[1]["traceparent"].split("-")[1] == request.trace_id


async def test_trace_failures_are_named_by_status_and_error(collector: Collector) -> None:
    async with router(to(collector, sample_ratio=1), fails=True) as (client, _engine):
        assert (await client.post("/v1/completions", json=BODY)).status == 503
        assert (await client.post("/v1/completions", json={"model": "other", "prompt": PROMPT})).status == 404
    requests = collector.named("kvstore.router.completions", 2)
    assert sorted((span.attributes["http.response.status_code"], span.error) for span in requests) == [(404, ""), (503, "503")]
    parts = collector.named("kvstore.router.schedule", SETTINGS.attempts)
    assert {span.error for span in parts} == {"Unavailable"}


async def test_trace_broken_stream_and_refusal_are_errors(collector: Collector) -> None:
    async with router(to(collector, sample_ratio=1)) as (client, engine):
        await client.post("/v1/completions", json={**BODY, **WHOLE})
        engine.script.extend([well, streams(event(choice([1])), then=hangs_up)])
        response = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert "error" in (await response.text())
    errors = {span.error for span in collector.named("kvstore.router.completions", 2)}
    assert errors == {"", "Unavailable"}
