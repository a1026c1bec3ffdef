"""Promises of relay.py, with engines on real sockets and a scheduler that says what the test says."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.client.instances.client import Placement, Refusal
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvstore.router.answers import Piece
from kvstore.router.config import RouterSettings
from kvstore.router.counters import Counters
from kvstore.router.engines import Engines
from kvstore.router.relay import Answer, Relay, Whole
from kvstore.router.sse import done, event
from kvstore.router.standin.tokens import text_of
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
    work,
)

BAD = answers(500, "no")


@asynccontextmanager
async def relay(
    scheduler: ScriptedScheduler, counters: Counters | None = None, settings: RouterSettings = SETTINGS
) -> AsyncIterator[Relay]:
    engines = Engines(settings)
    try:
        yield Relay(scheduler, engines, settings, counters or Counters())
    finally:
        await engines.close()


async def whole(answer: Answer | Refusal) -> list[Piece]:
    assert isinstance(answer, Answer)
    try:
        return [piece async for piece in answer.pieces()]
    finally:
        answer.close()


def test_the_first_token_comes_from_the_prefill_engine_and_the_others_from_the_decode_engine() -> None:
    async def test() -> None:
        async with ScriptedEngine() as prefill, ScriptedEngine() as decode:
            scheduler = ScriptedScheduler(placement(prefill.address, decode.address))
            async with relay(scheduler) as served:
                answer = await served.begin(work(max_tokens=5), Slo(ttft_s=3.0))
                pieces = await whole(answer)
            assert "".join(piece.text for piece in pieces) == text_of(following(PROMPT, 5))
            assert [piece.finish_reason for piece in pieces] == [None, None, None, None, "length"]
            assert (len(prefill.bodies), len(decode.bodies)) == (1, 1)
            assert scheduler.asked == [{"keys": [], "input_tokens": len(PROMPT), "output_tokens": 5, "slo": Slo(ttft_s=3.0)}]

    run(test())


def test_no_longer_an_answer_is_foreseen_than_is_usual() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            scheduler = ScriptedScheduler(placement(engine.address, engine.address))
            async with relay(scheduler) as served:
                await whole(await served.begin(work(max_tokens=400), Slo()))
            assert scheduler.asked[0]["output_tokens"] == SETTINGS.predicted_output_tokens

    run(test())


@pytest.mark.parametrize(("max_tokens", "finish_reason", "expected"), [(1, "length", "length"), (1, None, "length"), (9, "stop", "stop")])
def test_an_answer_of_one_token_needs_no_decode(max_tokens: int, finish_reason: str | None, expected: str) -> None:
    async def test() -> None:
        first = says(json.dumps(choice([97], finish_reason)))
        async with ScriptedEngine(first) as prefill, ScriptedEngine() as decode:
            async with relay(ScriptedScheduler(placement(prefill.address, decode.address))) as served:
                assert await whole(await served.begin(work(max_tokens=max_tokens), Slo())) == [Piece("a", 1, expected)]
            assert decode.bodies == []

    run(test())


def both(address: str) -> Placement:
    return dataclasses.replace(placement(address, address), decode=placement(address, address).prefill)


def test_an_engine_that_does_both_is_asked_once() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            async with relay(ScriptedScheduler(both(engine.address))) as served:
                pieces = await whole(await served.begin(work(max_tokens=3), Slo()))
            assert "".join(piece.text for piece in pieces) == text_of(following(PROMPT, 3))
            assert [piece.finish_reason for piece in pieces] == [None, None, "length"]
            [body] = engine.bodies
            assert (body["prompt"], body["max_tokens"], body["stream"]) == (PROMPT, 3, True)
            assert body["kv_transfer_params"] == {"request_id": 7, "prefix_blocks": 2}

    run(test())


def test_an_engine_that_does_both_may_make_one_token_only() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, relay(ScriptedScheduler(both(engine.address))) as served:
            complete = await served.complete(work(max_tokens=1), Slo())
            assert isinstance(complete, Whole)
            assert [piece.finish_reason for piece in complete.pieces] == ["length"]

    run(test())


@pytest.mark.parametrize("fails", ["refuses", "hangs up", "ends", "breaks off"])
def test_an_engine_that_does_both_and_fails_before_its_first_token_is_not_seen_to(fails: str) -> None:
    act = {"refuses": BAD, "hangs up": hangs_up, "ends": streams(done()), "breaks off": streams()}[fails]

    async def test() -> None:
        counters = Counters()
        async with ScriptedEngine(act) as engine, relay(ScriptedScheduler(both(engine.address)), counters) as served:
            pieces = await whole(await served.begin(work(max_tokens=3), Slo()))
            assert "".join(piece.text for piece in pieces) == text_of(following(PROMPT, 3))
            assert (len(engine.bodies), counters.retries) == (2, 1)

    run(test())


def test_a_rejection_is_handed_on_and_not_tried_again() -> None:
    async def test() -> None:
        refusal = Refusal(Reason.TTFT, 5.0, 1.0)
        scheduler = ScriptedScheduler(refusal)
        async with relay(scheduler) as served:
            assert await served.begin(work(), Slo()) == refusal
        assert len(scheduler.asked) == 1

    run(test())


@pytest.mark.parametrize("fails", ["scheduler", "prefill", "prefill hangs up", "decode", "decode hangs up"])
def test_what_fails_before_the_first_token_is_scheduled_anew(fails: str) -> None:
    async def test() -> None:
        async with ScriptedEngine() as prefill, ScriptedEngine() as decode:
            script: list[Placement | Refusal | Exception] = [placement(prefill.address, decode.address)]
            if fails == "scheduler":
                script.insert(0, Unavailable("no master"))
            else:
                engine = prefill if fails.startswith("prefill") else decode
                engine.script.append(hangs_up if "hangs" in fails else BAD)
            counters = Counters()
            async with relay(ScriptedScheduler(*script), counters) as served:
                pieces = await whole(await served.begin(work(max_tokens=3), Slo()))
            assert "".join(piece.text for piece in pieces) == text_of(following(PROMPT, 3))
            assert counters.retries == 1

    run(test())


def test_attempts_are_bounded() -> None:
    async def test() -> None:
        settings = dataclasses.replace(SETTINGS, attempts=3)
        async with ScriptedEngine(BAD, BAD, BAD) as engine:
            counters = Counters()
            async with relay(ScriptedScheduler(placement(engine.address, "")), counters, settings) as served:
                with pytest.raises(Unavailable, match=r"not served in 3 attempts; the last one: the engine at .* answers 500: no"):
                    await served.begin(work(), Slo())
            assert (len(engine.bodies), counters.retries) == (3, 2)

    run(test())


@pytest.mark.parametrize(
    ("settings", "error"), [(SETTINGS, InvalidArgument), (dataclasses.replace(SETTINGS, first_token_timeout_s=0.5), DeadlineExceeded)]
)
def test_what_another_engine_would_do_no_better_is_not_tried_again(settings: RouterSettings, error: type[Exception]) -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.script.append(answers(400, "no such thing") if error is InvalidArgument else engine.silent)
            async with relay(ScriptedScheduler(placement(engine.address, "")), None, settings) as served:
                with pytest.raises(error):
                    await served.begin(work(), Slo())
            assert len(engine.bodies) == 1

    run(test())


def test_a_complete_answer_is_whole_or_a_refusal() -> None:
    async def test() -> None:
        refusal = Refusal(Reason.TBT, 5.0, 1.0)
        async with ScriptedEngine() as prefill, ScriptedEngine(streams(event(choice([97])), then=hangs_up)) as decode:
            where = placement(prefill.address, decode.address)
            async with relay(ScriptedScheduler(where, where, refusal)) as served:
                whole_answer = await served.complete(work(), Slo())
                assert isinstance(whole_answer, Whole)
                assert "".join(piece.text for piece in whole_answer.pieces) == text_of(following(PROMPT, 5))
                assert (whole_answer.placement, len(decode.bodies)) == (where, 2)
                assert await served.complete(work(), Slo()) == refusal

    run(test())


def test_a_decode_that_fails_later_is_an_error_after_what_came() -> None:
    async def test() -> None:
        async with ScriptedEngine() as prefill, ScriptedEngine(streams(event(choice([97])), then=hangs_up)) as decode:
            async with relay(ScriptedScheduler(placement(prefill.address, decode.address))) as served:
                answer = await served.begin(work(), Slo())
                assert isinstance(answer, Answer)
                pieces = answer.pieces()
                first = following(PROMPT, 1)
                assert [await anext(pieces), await anext(pieces)] == [Piece(text_of(first), 1), Piece("a", 1)]
                with pytest.raises(Unavailable, match="hung up"):
                    await anext(pieces)
                answer.close()

    run(test())


def test_an_answer_that_ends_without_a_reason_is_an_error() -> None:
    async def test() -> None:
        async with ScriptedEngine() as prefill, ScriptedEngine(streams(event(choice([97])), done())) as decode:
            async with relay(ScriptedScheduler(placement(prefill.address, decode.address))) as served:
                with pytest.raises(Unavailable, match="ended the answer without a reason"):
                    await whole(await served.begin(work(), Slo()))

    run(test())


def test_cancelled_it_hangs_up_on_the_engine() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.script.append(engine.silent)
            async with relay(ScriptedScheduler(placement(engine.address, ""))) as served:
                serving = asyncio.create_task(served.begin(work(), Slo()))
                await engine.entered.wait()
                serving.cancel()
                await engine.cancelled.wait()

    run(test())
