"""Promises of app.py: HTTP clients and engines on real sockets, a scheduler that says what the test says."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from kvstore.client.instances.client import Placement, Refusal
from kvstore.kvcache.namespace import Namespace
from kvstore.kvcache.naming import NamespaceNaming
from kvstore.protocol.errors import Unavailable
from kvstore.router.answers import Head
from kvstore.router.app import DECISION_HEADER, RouterApp
from kvstore.router.config import RouterSettings
from kvstore.router.counters import Counters
from kvstore.router.engines import Engines
from kvstore.router.relay import Relay
from kvstore.router.sse import DONE, EventParser, event
from kvstore.router.standin.tokens import text_of
from kvstore.router.tokenizing import ByteTokenizer
from kvstore.scheduler.decision import Reason
from kvstore.scheduler.request import Slo
from tests.router.scripted import (
    PROMPT,
    SETTINGS,
    ScriptedEngine,
    ScriptedScheduler,
    answers,
    choice,
    following,
    hangs_up,
    placement,
    run,
    says,
    streams,
    well,
)

TEXT = bytes(PROMPT).decode()
BODY: dict[str, Any] = {"model": "m", "prompt": TEXT, "max_tokens": 5}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CHAT_PROMPT = list(b"<|user|>\nHi\n<|assistant|>\n")
NAMING = NamespaceNaming(Namespace(model="m", dtype="bfloat16", block_tokens=4))
SOLE = dataclasses.replace(SETTINGS, attempts=1)


@dataclass
class Served:
    """A router and the one engine behind it, which prefills and decodes."""

    client: Any
    engine: ScriptedEngine
    scheduler: ScriptedScheduler
    counters: Counters

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
async def served(*script: Placement | Refusal | Exception, settings: RouterSettings = SETTINGS) -> AsyncIterator[Served]:
    counters, engines = Counters(), Engines(settings)
    with ThreadPoolExecutor(2) as threads:
        async with ScriptedEngine() as engine:
            scheduler = ScriptedScheduler(*(script or (placement(engine.address, engine.address),)))
            app = RouterApp(Relay(scheduler, engines, settings, counters), ByteTokenizer(), NAMING, settings, counters, threads)
            async with TestClient(TestServer(app.web)) as client:
                yield Served(client, engine, scheduler, counters)
            await engines.close()


async def events(response: ClientResponse) -> list[Any]:
    """The data of all events: objects, and the text of the last one."""
    assert response.headers["Content-Type"] == "text/event-stream"
    found = EventParser().feed(await response.read())
    return [data if data == DONE else json.loads(data) for data in found]


def test_a_completion() -> None:
    async def test() -> None:
        async with served() as router:
            response = await router.post(BODY)
            answer = await response.json()
            assert response.status == 200
            assert answer["object"] == "text_completion"
            assert answer["choices"] == [{"index": 0, "text": text_of(following(PROMPT, 5)), "logprobs": None, "finish_reason": "length"}]
            assert answer["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 5, "total_tokens": len(PROMPT) + 5}
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

    run(test())


def test_the_scheduler_is_asked_with_the_keys_that_engines_use_and_the_slos_of_the_request() -> None:
    async def test() -> None:
        async with served(settings=dataclasses.replace(SETTINGS, ttft_slo_s=9.0)) as router:
            await router.post({**BODY, "prompt": PROMPT}, x_kvstore_tbt_slo_s="0.5")
            keys = Namespace(model="m", dtype="bfloat16", block_tokens=4).block_keys(PROMPT)
            slo = Slo(ttft_s=9.0, tbt_s=0.5)
            assert len(keys) == len(PROMPT) // 4
            assert router.scheduler.asked == [{"keys": keys, "input_tokens": len(PROMPT), "output_tokens": 5, "slo": slo}]

    run(test())


def test_a_stream_of_a_completion() -> None:
    async def test() -> None:
        async with served() as router:
            response = await router.post({**BODY, "stream": True, "stream_options": {"include_usage": True}})
            *parts, usage, last = await events(response)
            assert DECISION_HEADER in response.headers
            assert [part["choices"][0]["text"] for part in parts] == list(text_of(following(PROMPT, 5)))
            assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 4 + ["length"]
            assert usage["usage"]["completion_tokens"] == 5
            assert last == DONE
            assert len({part["id"] for part in [*parts, usage]}) == 1
            first, whole = (sum(one.counts().counts) for one in (router.counters.first_tokens, router.counters.durations))
            assert (first, whole) == (1, 1), "a streamed answer has a first token, once"

    run(test())


def test_a_chat_whole_and_streamed() -> None:
    async def test() -> None:
        async with served() as router:
            text = text_of(following(CHAT_PROMPT, 4))
            answer = await (await router.post(CHAT, "/v1/chat/completions")).json()
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
            opening, *parts, last = await events(await router.post({**CHAT, "stream": True}, "/v1/chat/completions"))
            assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == text
            assert last == DONE
            assert router.engine.bodies[0]["prompt"] == CHAT_PROMPT

    run(test())


def test_models_health_and_counts() -> None:
    async def test() -> None:
        async with served() as router:
            await router.post(BODY)
            [model] = (await (await router.client.get("/v1/models")).json())["data"]
            assert (model["id"], model["object"]) == ("m", "model")
            assert await (await router.client.get("/health")).json() == {"status": "ok"}
            stats = await (await router.client.get("/stats")).json()
            assert {name: stats[name] for name in ("active", "requests", "completed", "failed", "output_tokens")} == {
                "active": 0,
                "requests": 1,
                "completed": 1,
                "failed": 0,
                "output_tokens": 5,
            }
            assert (stats["prompt_tokens"], stats["prefix_tokens"]) == (len(PROMPT), 8)
            assert router.counters.durations.counts().sum_s > 0
            assert sum(router.counters.first_tokens.counts().counts) == 0, "the whole answer came at once"

    run(test())


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{", 400, None, "the body is not JSON: "),
        ({"model": "m"}, 400, None, "prompt is a text or a list of token ids"),
        ({**BODY, "prompt": ""}, 400, None, "the prompt is empty"),
        ({**BODY, "prompt": "\ud800"}, 400, None, "the prompt is no Unicode text"),
        ({**BODY, "max_tokens": 11}, 400, None, "max_tokens is 11, above the limit of 10"),
        ({**BODY, "model": "other"}, 404, "model_not_found", "there is no model 'other' here; there is 'm'"),
        ({**BODY, "prompt": [1] * 101}, 413, "context_length_exceeded", "the prompt has 101 tokens, above the limit of 100"),
        ({**BODY, "prompt": "x" * 3000}, 413, None, "Maximum request body size 2048 exceeded"),
    ],
)
def test_a_request_that_cannot_be_served_gets_one_clear_message(body: Any, status: int, code: str | None, message: str) -> None:
    settings = dataclasses.replace(
        SETTINGS, max_prompt_tokens=100, max_output_tokens=10, default_output_tokens=5, max_body_bytes=type(SETTINGS.max_body_bytes)(2048)
    )

    async def test() -> None:
        async with served(settings=settings) as router:
            got, error, _ = await router.refused(body)
            assert (got, error["code"]) == (status, code)
            assert error["message"].startswith(message)
            assert router.scheduler.asked == []
            assert (await router.post({**BODY, "max_tokens": 2})).status == 200

    run(test())


def test_a_bad_slo_an_unknown_path_and_a_wrong_method_are_errors_of_the_same_form() -> None:
    async def test() -> None:
        async with served() as router:
            status, error, _ = await router.refused(BODY, x_kvstore_ttft_slo_s="soon")
            assert (status, error["message"][:34]) == (400, "the header x-kvstore-ttft-slo-s is")
            assert (await router.refused(BODY, "/v2/completions"))[0] == 404
            response = await router.client.get("/v1/completions")
            assert (response.status, response.headers["Allow"]) == (405, "POST")

    run(test())


def test_a_rejection_is_429_with_reason_value_and_limit() -> None:
    async def test() -> None:
        async with served(Refusal(Reason.TTFT, 4.5, 2.0)) as router:
            status, error, response = await router.refused(BODY)
            assert (status, error["reason"], error["value"], error["limit"]) == (429, "ttft", 4.5, 2.0)
            assert response.headers["Retry-After"] == "3"
            assert router.counters.rejected == {"ttft": 1}

    run(test())


def test_a_master_that_is_gone_is_503() -> None:
    async def test() -> None:
        async with served(Unavailable("no master can be reached")) as router:
            status, error, response = await router.refused(BODY)
            assert (status, response.headers["Retry-After"]) == (503, "1")
            assert error["message"] == "not served in 6 attempts; the last one: no master can be reached"
            assert router.counters.failed == 1

    run(test())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_mistake_is_an_error_of_the_same_form_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_streamed: bool
) -> None:
    def fails(_head: Head, _pieces: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Head, "part" if is_streamed else "whole", fails)

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
            assert (router.counters.failed, router.counters.completed, router.counters.active) == (1, int(not is_streamed), 0)

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "ZeroDivisionError" in caplog.text


def test_tokens_that_were_not_computed_are_counted_as_the_engine_says() -> None:
    async def test() -> None:
        async with served() as router:
            said = {**choice(following(PROMPT, 1)), "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}
            router.engine.script.append(says(json.dumps(said)))
            assert (await router.post(BODY)).status == 200
            router.engine.script.append(says(json.dumps(said)))
            await events(await router.post({**BODY, "stream": True}))
            router.engine.script.append(says(json.dumps(said)))
            assert (await router.post({**BODY, "max_tokens": 1})).status == 200
            assert router.counters.prefix_tokens == 12

    run(test())


def test_an_engines_refusal_is_the_clients_error() -> None:
    async def test() -> None:
        async with served() as router:
            router.engine.script.append(answers(400, "stop is too long"))
            status, error, _ = await router.refused(BODY)
            assert (status, error["message"]) == (400, "the engine refuses the request: stop is too long")
            assert router.counters.failed == 0

    run(test())


def test_a_failure_after_the_first_byte_is_an_event() -> None:
    async def test() -> None:
        async with served() as router:
            router.engine.script += [answers(500, "no"), well, streams(event(choice([97])), then=hangs_up)]
            response = await router.post({**BODY, "stream": True})
            assert response.status == 200
            first, second, error, last = await events(response)
            assert second["choices"][0]["text"] == "a"
            assert error["error"]["type"] == "service_unavailable_error"
            assert last == DONE
            assert router.counters.failed == 1
            assert first["choices"][0]["finish_reason"] is None

    run(test())


def test_a_whole_answer_that_breaks_off_is_made_anew() -> None:
    async def test() -> None:
        async with served() as router:
            router.engine.script += [well, streams(event(choice([97])), then=hangs_up)]
            answer = await (await router.post(BODY)).json()
            assert answer["choices"][0]["text"] == text_of(following(PROMPT, 5))
            assert (router.counters.retries, router.counters.completed, router.counters.failed) == (1, 1, 0)

    run(test())


def test_a_whole_answer_that_cannot_be_had_is_an_error() -> None:
    async def test() -> None:
        async with served(settings=SOLE) as router:
            router.engine.script += [well, streams(event(choice([97])), then=hangs_up)]
            status, error, _ = await router.refused(BODY)
            assert (status, error["type"]) == (503, "service_unavailable_error")
            assert (router.counters.failed, router.counters.completed) == (1, 0)

    run(test())


def test_requests_beyond_the_limit_are_refused_and_a_client_that_hangs_up_frees_its_place() -> None:
    async def test() -> None:
        async with served(settings=dataclasses.replace(SETTINGS, max_requests=1)) as router:
            router.engine.script.append(router.engine.silent)
            waiting = asyncio.create_task(router.post(BODY))
            await router.engine.entered.wait()
            status, error, response = await router.refused(BODY)
            assert (status, error["code"], response.headers["Retry-After"]) == (503, "busy", "1")
            waiting.cancel()
            await router.engine.cancelled.wait()
            while router.counters.active:
                await asyncio.sleep(0.001)
            assert router.counters.hung_up == 1
            assert (await router.post(BODY)).status == 200

    run(test())


def test_a_client_that_hangs_up_within_a_stream_is_heard_of_at_the_engine() -> None:
    async def test() -> None:
        async with served() as router:
            router.engine.script += [well, streams(event(choice([97])), then=router.engine.silent)]
            response = await router.post({**BODY, "stream": True})
            assert await response.content.readline()
            response.close()
            await router.engine.cancelled.wait()
            while router.counters.active:
                await asyncio.sleep(0.001)
            assert (router.counters.hung_up, router.counters.completed) == (1, 0)

    run(test())


def test_a_client_that_takes_nothing_is_hung_up_on() -> None:
    async def test() -> None:
        async with served(settings=dataclasses.replace(SETTINGS, client_timeout_s=0.5)) as router:
            much = event({"choices": [{"index": 0, "text": "x" * 60_000}]})
            router.engine.script += [well, streams(*[much] * 400)]
            response = await router.post({**BODY, "stream": True})
            response._connection.transport.pause_reading()  # type: ignore[union-attr]
            while router.counters.active:
                await asyncio.sleep(0.01)
            assert (router.counters.hung_up, router.counters.completed) == (1, 0)
            response.close()

    run(test())


def test_a_body_that_does_not_come_is_408() -> None:
    async def test() -> None:
        async with served(settings=dataclasses.replace(SETTINGS, client_timeout_s=0.05)) as router:
            reader, writer = await asyncio.open_connection(router.client.host, router.client.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert b" 408 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    run(test())


def test_a_body_that_does_not_decompress_is_the_clients_error() -> None:
    async def test() -> None:
        async with served() as router:
            headers = {"Content-Encoding": "gzip"}
            response = await router.client.post("/v1/completions", data=b"no gzip", headers=headers)
            problem = (await response.json())["error"]
            assert (response.status, problem["type"]) == (400, "invalid_request_error")
            assert problem["message"] == "the body of the request is not encoded as its headers say"
            assert router.counters.failed == 0

    run(test())


def test_a_client_that_hangs_up_within_its_body_frees_its_place() -> None:
    async def test() -> None:
        async with served() as router:
            _reader, writer = await asyncio.open_connection(router.client.host, router.client.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            while not router.counters.active:
                await asyncio.sleep(0.001)
            writer.close()
            await writer.wait_closed()
            while router.counters.active:
                await asyncio.sleep(0.001)
            assert router.counters.hung_up == 1
            assert (await router.post(BODY)).status == 200

    run(test())
