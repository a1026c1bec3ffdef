"""Promises of app.py: HTTP clients and engines on real sockets, a scheduler that says what the test says."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client import Client, Retention
from kvstore.client.instances.client import Refusal, RequestPlacement
from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Unavailable
from kvstore.router.answer_reader import DONE, EventParser, event
from kvstore.router.app import DECISION_HEADER, ROUTED_HEADER, EndSession, RouterApp
from kvstore.router.config import RouterSettings
from kvstore.router.engines import MAX_BUFFERED_BYTES, EngineAnswer, Engines
from kvstore.router.fake_engine.compute import text_of
from kvstore.router.metrics import RouterCounters
from kvstore.router.proxy import StreamingProxy
from kvstore.router.tokenizer import PromptTokenizer
from kvstore.scheduler.request import Slo
from tests.router.scripted import (
    PROMPT,
    SETTINGS,
    TEXT,
    ScriptedEngine,
    ScriptedScheduler,
    answers,
    choice,
    following,
    hangs_up,
    placement,
    prompt_tokens,
    run,
    says,
    streams,
    well,
)

BODY: dict[str, Any] = {"model": "m", "prompt": TEXT, "max_tokens": 5}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
NAMING = NamespaceNaming(Namespace(model="m", dtype="bfloat16", block_tokens=4))


@dataclass
class Served:
    """A router and the one engine behind it, which prefills and decodes."""

    client: Any
    engine: ScriptedEngine
    scheduler: ScriptedScheduler
    counters: RouterCounters

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> ClientResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response: ClientResponse = await self.client.post(path, data=data, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return response

    async def refused(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any], ClientResponse]:
        response = await self.post(body, path, **headers)
        answer = await response.json()
        assert set(answer) == {"error"}
        assert {"message", "type", "param", "code"} <= set(answer["error"])
        return response.status, answer["error"], response


@asynccontextmanager
async def served(
    *script: RequestPlacement | Refusal | Exception, settings: RouterSettings = SETTINGS, end_session: EndSession | None = None
) -> AsyncIterator[Served]:
    counters, engines = RouterCounters(), Engines(settings)
    with ThreadPoolExecutor(2) as threads:
        async with ScriptedEngine() as engine:
            scheduler = ScriptedScheduler(*(script or (placement(engine.address, engine.address),)))
            proxy, tokenizer = StreamingProxy(scheduler, engines, settings, counters), PromptTokenizer(engines, NAMING, threads, counters)
            tokenizer.learn(engine.address)
            app = RouterApp(proxy, tokenizer, settings, counters, end_session=end_session)
            async with TestClient(TestServer(app.web)) as client:
                yield Served(client, engine, scheduler, counters)
            await engines.close()


async def idle(router: Served) -> None:
    """Wait until no request is being served: then all are counted."""
    while router.counters.active:
        await asyncio.sleep(0.001)


async def events(response: ClientResponse) -> list[Any]:
    """The data of all events: objects, and the text of the last one."""
    assert response.headers["Content-Type"] == "text/event-stream"
    found = EventParser().feed(await response.read())
    return [data if data == DONE else json.loads(data) for data in found]


async def test_an_answer_is_the_engines_own() -> None:
    async with served() as router:
        body = '{ "id": "x", "choices": [], "novel": [1.0], "usage": {"prompt_tokens_details": {"cached_tokens": 4}} }'
        router.engine.script += [well, says(body, 200, Content_Type="application/json")]
        response = await router.post(BODY)
        assert (response.status, await response.text()) == (200, body)
        assert response.headers["Content-Type"].startswith("application/json")
        assert response.headers[ROUTED_HEADER] == "prefix"
        assert json.loads(response.headers[DECISION_HEADER]) == {
            "prefill": "p",
            "decode": "d",
            "prefix_blocks": 2,
            "transfer_from": "",
            "transfer_blocks": 0,
            "transfer_s": 0.0,
            "queue_s": 0.25,
            "prefill_s": 0.5,
            "tbt_s": 0.01,
        }


async def test_app_schedules_with_engine_keys_and_request_slos() -> None:
    async with served(settings=replace(SETTINGS, ttft_slo_s=9.0)) as router:
        await router.post({**BODY, "prompt": PROMPT}, x_kvstore_tbt_slo_s="0.5")
        keys = Namespace(model="m", dtype="bfloat16", block_tokens=4).block_keys(PROMPT)
        slo = Slo(ttft_s=9.0, tbt_s=0.5)
        assert len(keys) == len(PROMPT) // 4
        assert router.scheduler.asked == [{"keys": keys, "input_tokens": len(PROMPT), "output_tokens": 5, "slo": slo}]


@pytest.mark.parametrize("members", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_is_the_engines_own(members: dict[str, Any]) -> None:
    async with served() as router:
        response = await router.post({**BODY, "stream": True, **members})
        *parts, last = await events(response)
        texts = [part["choices"][0]["text"] for part in parts if part["choices"]]
        assert texts == list(text_of(following(PROMPT, 5)))
        assert (len(parts), last) == (5 + len(members), DONE)
        await idle(router)
        first, whole = (sum(one.counts().counts) for one in (router.counters.first_tokens, router.counters.durations))
        assert (first, whole) == (1, 1), "a streamed answer has a first token, once"
        await idle(router)
        assert router.counters.output_tokens == 5


async def test_a_chat_is_scheduled_by_the_engines_tokens() -> None:
    async with served() as router:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
        messages = [*CHAT["messages"], call, {"role": "tool", "tool_call_id": "1", "content": "4"}]
        body = {**CHAT, "messages": messages, "tools": tools, "parallel_tool_calls": False, "store": True}
        response = await router.post(body, "/v1/chat/completions")
        expected = prompt_tokens(body)
        assert (response.status, response.headers[ROUTED_HEADER]) == (200, "prefix")
        assert [each["input_tokens"] for each in router.scheduler.asked] == [len(expected)]
        assert router.scheduler.asked[0]["keys"] == NAMING.block_keys(expected)
        assert (await response.json())["usage"]["prompt_tokens"] == len(expected)
        await idle(router)
        assert router.counters.token_mismatches == 0


async def test_what_has_no_exact_tokens_is_routed_by_load_unchanged() -> None:
    async with served() as router:
        body = {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "n": 2}
        response = await router.post(body, "/v1/chat/completions")
        assert (response.status, response.headers[ROUTED_HEADER]) == (200, "load; content")
        assert router.engine.raw == [json.dumps(body).encode()]
        assert router.scheduler.asked[0]["keys"] == []
        await idle(router)
        assert router.counters.routed_by_load == {"content": 1}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_is_continued_where_it_is_kept(*, is_streamed: bool) -> None:
    async with served() as router, ScriptedEngine() as keeper:
        stored = {"id": "resp_1", "object": "response", "usage": {"input_tokens": 3}}
        frame = event({"type": "response.completed", "response": stored})
        keeper.script.extend([streams(frame) if is_streamed else says(json.dumps(stored))] * 4)
        router.scheduler.script.clear()
        router.scheduler.script.append(placement(keeper.address, router.engine.address))
        asked = {"model": "m", "input": "Hi", "stream": is_streamed}
        first = await router.post(asked, "/v1/responses")
        assert (await first.read(), first.headers[ROUTED_HEADER])[1] == "load; api"
        following_up = await router.post({**asked, "previous_response_id": "resp_1"}, "/v1/responses")
        assert (following_up.status, following_up.headers[ROUTED_HEADER]) == (200, "response")
        assert DECISION_HEADER not in following_up.headers
        assert (await router.client.get("/v1/responses/resp_1?stream=false")).status == 200
        assert (await router.client.post("/v1/responses/resp_1/cancel")).status == 200
        assert keeper.paths == ["/v1/responses"] * 2 + ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"]
        assert len(router.scheduler.asked) == 1


async def test_an_unknown_response_is_the_engines_to_find() -> None:
    async with served() as router:
        router.engine.script.append(answers(404, "Response with id 'resp_9' not found."))
        asked = {"model": "m", "input": "Hi", "previous_response_id": "resp_9"}
        response = await router.post(asked, "/v1/responses")
        assert (response.status, await response.json()) == (404, {"error": {"message": "Response with id 'resp_9' not found."}})
        missing = await router.client.get("/v1/responses/resp_9")
        assert missing.status == 404
        assert "unknown response 'resp_9'" in (await missing.json())["error"]["message"]


async def test_models_health_and_counts() -> None:
    async with served() as router:
        await router.post(BODY)
        [model] = (await (await router.client.get("/v1/models")).json())["data"]
        assert (model["id"], model["object"]) == ("m", "model")
        assert await (await router.client.get("/health")).json() == {"status": "ok"}
        await idle(router)
        stats = await (await router.client.get("/stats")).json()
        assert {name: stats[name] for name in ("active", "requests", "completed", "failed", "output_tokens")} == {
            "active": 0,
            "requests": 1,
            "completed": 1,
            "failed": 0,
            "output_tokens": 5,
        }
        assert (stats["prompt_tokens"], stats["prefix_tokens"]) == (len(PROMPT), 8)
        await idle(router)
        assert router.counters.durations.counts().sum_s > 0
        assert sum(router.counters.first_tokens.counts().counts) == 0, "the whole answer came at once"


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{", 400, None, "the body is not JSON: "),
        ({**BODY, "model": 1}, 400, None, "model must be a string"),
        ({**BODY, "model": "other"}, 404, "model_not_found", "no model 'other': this router serves 'm'"),
        ({**BODY, "prompt": "x" * 3000}, 413, None, "the body of the request is longer than 2048 bytes: "),
    ],
)
async def test_a_request_that_cannot_be_served_gets_one_clear_message(body: Any, status: int, code: str | None, message: str) -> None:
    settings = replace(SETTINGS, max_body_bytes=type(SETTINGS.max_body_bytes)(2048))

    async with served(settings=settings) as router:
        got, error, _ = await router.refused(body)
        assert (got, error["code"]) == (status, code)
        assert error["message"].startswith(message)
        assert router.scheduler.asked == []
        assert (await router.post({**BODY, "max_tokens": 2})).status == 200


async def test_app_client_errors_have_one_form() -> None:
    async with served() as router:
        status, error, _ = await router.refused(BODY, x_kvstore_ttft_slo_s="soon")
        assert (status, error["message"][:34]) == (400, "the header x-kvstore-ttft-slo-s mu")
        assert (await router.refused(BODY, "/v2/completions"))[0] == 404
        response = await router.client.get("/v1/completions")
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_a_master_that_is_gone_is_503() -> None:
    async with served(Unavailable("no master can be reached")) as router:
        status, error, response = await router.refused(BODY)
        assert (status, response.headers["Retry-After"]) == (503, "1")
        assert error["message"] == "all 6 attempts failed; the last one: no master can be reached"
        await idle(router)
        assert router.counters.failed == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_app_internal_error_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_streamed: bool
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    if is_streamed:
        monkeypatch.setattr(EngineAnswer, "chunks", fails)
    else:
        monkeypatch.setattr(PromptTokenizer, "prompt", fails)

    async def test() -> None:
        async with served() as router:
            if is_streamed:
                told, last = await events(await router.post({**BODY, "stream": True}))
                assert last == DONE
                error = told["error"]
            else:
                status, error, _ = await router.refused(BODY)
                assert status == 500
            assert error["message"] == "internal error: ZeroDivisionError: a mistake"
            await idle(router)
            assert (router.counters.failed, router.counters.completed, router.counters.active) == (1, 0, 0)

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "ZeroDivisionError" in caplog.text


async def test_a_failure_after_the_first_byte_is_an_event() -> None:
    async with served() as router:
        router.engine.script += [answers(500, "no"), well, streams(event(choice([97])), b"data: {", then=hangs_up)]
        response = await router.post({**BODY, "stream": True})
        assert response.status == 200
        first, _, error, last = EventParser().feed(await response.read())
        assert json.loads(first)["choices"][0]["text"] == "a"
        assert json.loads(error)["error"]["type"] == "service_unavailable_error"
        assert last == DONE
        await idle(router)
        assert (router.counters.failed, router.counters.completed) == (1, 0)


async def test_a_long_answer_that_breaks_off_ends_without_its_rest() -> None:
    async def long(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b" " * (MAX_BUFFERED_BYTES + 1))
        return await hangs_up(request, body)

    async with served() as router:
        router.engine.script += [well, long]
        response = await router.post(BODY)
        with pytest.raises(ClientPayloadError):
            await response.read()
        await idle(router)
        assert (router.counters.failed, router.counters.completed) == (1, 0)


async def test_a_whole_answer_that_breaks_off_is_made_anew() -> None:
    async def breaks_off(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"choices": [')
        return await hangs_up(request, body)

    async with served() as router:
        router.engine.script += [well, breaks_off]
        answer = await (await router.post(BODY)).json()
        assert answer["choices"][0]["text"] == text_of(following(PROMPT, 5))
        await idle(router)
        assert (router.counters.retries, router.counters.completed, router.counters.failed) == (1, 1, 0)


async def test_app_refuses_over_limit_and_frees_disconnected() -> None:
    async with served(settings=replace(SETTINGS, max_requests=1)) as router:
        router.engine.script.append(router.engine.silent)
        waiting = asyncio.create_task(router.post(BODY))
        await router.engine.entered.wait()
        status, error, response = await router.refused(BODY)
        assert (status, error["code"], response.headers["Retry-After"]) == (503, "busy", "1")
        waiting.cancel()
        await router.engine.cancelled.wait()
        await idle(router)
        assert router.counters.disconnects == 1
        assert (await router.post(BODY)).status == 200


async def test_app_disconnect_in_a_stream_reaches_the_engine() -> None:
    async with served() as router:
        router.engine.script += [well, streams(event(choice([97])), then=router.engine.silent)]
        response = await router.post({**BODY, "stream": True})
        assert await response.content.readline()
        response.close()
        await router.engine.cancelled.wait()
        await idle(router)
        assert (router.counters.disconnects, router.counters.completed) == (1, 0)


async def test_a_client_that_takes_nothing_is_hung_up_on() -> None:
    async with served(settings=replace(SETTINGS, client_timeout_s=0.5)) as router:
        much = event({"choices": [{"index": 0, "text": "x" * 60_000}]})
        router.engine.script += [well, streams(*[much] * 400)]
        response = await router.post({**BODY, "stream": True})
        response._connection.transport.pause_reading()  # type: ignore[union-attr]
        await idle(router)
        assert (router.counters.disconnects, router.counters.completed) == (1, 0)
        response.close()


async def test_a_body_that_does_not_come_is_408() -> None:
    async with served(settings=replace(SETTINGS, client_timeout_s=0.05)) as router:
        reader, writer = await asyncio.open_connection(router.client.host, router.client.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


HINTED = replace(SETTINGS, retention_from_requests=True, retention_ceiling=60)


async def test_header_of_hints_reaches_the_engine_up_to_the_ceiling() -> None:
    async with served(settings=HINTED) as router:
        response = await router.post(BODY, x_kvstore_retention="priority=90, ttl_s=60, session=chat-7")
        assert response.status == 200
        hints = {"priority": 60, "ttl_s": 60, "session": "chat-7"}
        assert [body["kv_transfer_params"]["retention"] for body in router.engine.bodies] == [hints, hints]


async def test_malformed_header_of_hints_is_refused() -> None:
    async with served(settings=HINTED) as router:
        status, error, _ = await router.refused(BODY, x_kvstore_retention="priority=high")
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert "x-kvstore-retention" in error["message"]


async def test_header_of_hints_is_ignored_unless_allowed() -> None:
    async with served() as router:
        assert (await router.post(BODY, x_kvstore_retention="priority=high")).status == 200
        assert all("retention" not in body["kv_transfer_params"] for body in router.engine.bodies)


async def test_session_is_ended_at_the_store(two_nodes: LocalCluster) -> None:
    with Client(two_nodes.address) as store:
        store.put_batch([b"router 1", b"router 2"], [b"value"] * 2, retention=Retention(session="chat/7"))
        async with served(settings=HINTED, end_session=store.end_session) as router:
            for blocks in (2, 0):
                response = await router.client.delete("/kvstore/sessions/chat%2F7")
                assert (response.status, await response.json()) == (200, {"session": "chat/7", "blocks": blocks})


async def test_session_that_cannot_be_ended_is_an_error() -> None:
    def end_session(session: str) -> int:
        raise Unavailable("no master")

    async with served(settings=HINTED, end_session=end_session) as router:
        assert (await router.client.delete("/kvstore/sessions/chat-7")).status == 503


async def test_sessions_have_no_path_unless_allowed() -> None:
    async with served() as router:
        assert (await router.client.delete("/kvstore/sessions/chat-7")).status == 404
