"""Promises of proxy.py, with engines on real sockets and a scheduler that says what the test says."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvstore.client.instances.client import Refusal, RequestPlacement
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.router.answer_reader import event
from kvstore.router.config import RouterSettings
from kvstore.router.engines import Engines
from kvstore.router.fake_engine.compute import text_of
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import parse_request
from kvstore.router.proxy import ProxiedResponse, StreamingProxy
from kvstore.router.tokenizer import TokenizedPrompt
from kvstore.scheduler.request import Slo
from tests.router.scripted import (
    PROMPT,
    SETTINGS,
    Act,
    ScriptedEngine,
    ScriptedScheduler,
    answers,
    choice,
    completion,
    following,
    hangs_up,
    placement,
    says,
    streams,
)

BAD = answers(500, "no")
PREFIX = TokenizedPrompt(len(PROMPT), [b"key"])
TEXT = text_of(following(PROMPT, 5))


@asynccontextmanager
async def proxy(
    scheduler: ScriptedScheduler, counters: RouterCounters | None = None, settings: RouterSettings = SETTINGS
) -> AsyncIterator[StreamingProxy]:
    engines = Engines(settings)
    try:
        yield StreamingProxy(scheduler, engines, settings, counters or RouterCounters())
    finally:
        await engines.close()


async def read(proxied: ProxiedResponse | Refusal) -> bytes:
    assert isinstance(proxied, ProxiedResponse)
    try:
        return b"".join([chunk async for chunk in proxied.answer.chunks()])
    finally:
        proxied.answer.close()


async def text(proxied: ProxiedResponse | Refusal) -> str:
    found: str = json.loads(await read(proxied))["choices"][0]["text"]
    return found


def both(address: str) -> RequestPlacement:
    """An instance that prefills and decodes."""
    return dataclasses.replace(placement(address, address), decode="p")


async def test_two_engines_get_one_request_and_the_second_answers() -> None:
    async with ScriptedEngine() as prefill, ScriptedEngine() as decode:
        scheduler = ScriptedScheduler(placement(prefill.address, decode.address))
        async with proxy(scheduler) as served:
            proxied = await served.begin(completion(), PREFIX, Slo(ttft_s=3.0))
            assert await text(proxied) == TEXT
            assert isinstance(proxied, ProxiedResponse)
            assert proxied.address == decode.address
        assert scheduler.asked == [{"keys": [b"key"], "input_tokens": len(PROMPT), "output_tokens": 5, "slo": Slo(ttft_s=3.0)}]
        ours = {name: body.pop("kv_transfer_params") for name, [body] in (("prefill", prefill.bodies), ("decode", decode.bodies))}
        assert prefill.bodies == [{**completion().members, "max_tokens": 1, "stream": False}]
        assert decode.bodies == [completion().members]
        assert ours["decode"] == {"blocks": 3, "of": "engine", "request_id": 7}


async def test_one_engine_gets_the_bytes_of_the_client() -> None:
    raw = b'{ "prompt":"x",\n"temperature": 1.0000000000000001, "max_tokens": 3, "\\u0061": NaN}'
    asked = parse_request("/v1/completions", raw, {})
    async with ScriptedEngine() as engine, proxy(ScriptedScheduler(both(engine.address))) as served:
        await read(await served.begin(asked, PREFIX, Slo()))
        assert engine.raw == [raw]
        assert engine.headers[0]["x-kvstore-request-id"] == "7"


@pytest.mark.parametrize("members", [{"n": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"best_of": 3}])
async def test_an_unsplittable_request_goes_to_the_prefill_engine(members: dict[str, Any]) -> None:
    async with ScriptedEngine() as prefill, ScriptedEngine() as decode:
        async with proxy(ScriptedScheduler(placement(prefill.address, decode.address))) as served:
            asked = completion(**members)
            await read(await served.begin(asked, PREFIX, Slo()))
        assert (prefill.raw, decode.raw) == ([asked.body], [])


@pytest.mark.parametrize("split", [False, True])
async def test_an_engine_that_refuses_answers_the_client(*, split: bool) -> None:
    body = '{"error": {"message": "bad", "type": "BadRequestError", "param": null, "code": 400}}'
    async with ScriptedEngine(*[says(body, 400)] * 2) as prefill, ScriptedEngine() as decode:
        where = placement(prefill.address, decode.address) if split else both(prefill.address)
        async with proxy(ScriptedScheduler(where)) as served:
            proxied = await served.begin(completion(), PREFIX, Slo())
            assert await read(proxied) == body.encode()
            assert isinstance(proxied, ProxiedResponse)
            assert proxied.answer.status == 400
        assert (prefill.raw[-1], len(prefill.bodies), decode.bodies) == (completion().body, 1 + split, [])


FAILURES = {
    "refuses": BAD,
    "hangs up": hangs_up,
    "drops": says(json.dumps(choice([], "abort"))),
    "ends": streams(),
    "fails": streams(event({"error": {"message": "no"}})),
}


@pytest.mark.parametrize("act", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("who", ["one", "prefill", "decode"])
async def test_a_failure_before_the_first_byte_is_scheduled_anew(act: Act, who: str) -> None:
    async with ScriptedEngine() as prefill, ScriptedEngine() as decode:
        (decode if who == "decode" else prefill).script.append(act)
        where = both(prefill.address) if who == "one" else placement(prefill.address, decode.address)
        counters = RouterCounters()
        async with proxy(ScriptedScheduler(where), counters) as served:
            assert await text(await served.begin(completion(), PREFIX, Slo())) == TEXT
        assert counters.retries == 1


async def test_a_master_that_is_away_is_asked_again() -> None:
    async with ScriptedEngine() as engine, proxy(ScriptedScheduler(Unavailable("no master"), both(engine.address))) as served:
        assert await text(await served.begin(completion(), PREFIX, Slo())) == TEXT


async def test_the_last_attempt_gives_the_engines_own_failure() -> None:
    settings = replace(SETTINGS, attempts=3)
    async with ScriptedEngine(BAD, BAD, answers(503, "last")) as engine:
        counters = RouterCounters()
        async with proxy(ScriptedScheduler(both(engine.address)), counters, settings) as served:
            proxied = await served.begin(completion(), PREFIX, Slo())
            assert json.loads(await read(proxied)) == {"error": {"message": "last"}}
            assert isinstance(proxied, ProxiedResponse)
            assert (proxied.answer.status, len(engine.bodies), counters.retries) == (503, 3, 2)


async def test_a_deadline_is_not_tried_again() -> None:
    async with ScriptedEngine() as engine:
        engine.script.append(engine.silent)
        settings = replace(SETTINGS, answer_timeout_s=0.5)
        counters = RouterCounters()
        async with proxy(ScriptedScheduler(both(engine.address)), counters, settings) as served:
            with pytest.raises(DeadlineExceeded):
                await served.begin(completion(), PREFIX, Slo())
        assert counters.retries == 0


async def test_cancelled_it_hangs_up_on_the_engine() -> None:
    async with ScriptedEngine() as engine:
        engine.script.append(engine.silent)
        async with proxy(ScriptedScheduler(both(engine.address))) as served:
            serving = asyncio.create_task(served.begin(completion(), PREFIX, Slo()))
            await engine.entered.wait()
            serving.cancel()
            await engine.cancelled.wait()
