"""Requests to kvstore-router and to vLLM itself: the answers are equal in every field, by one engine and by two."""

import json
from typing import Any, Final

import pytest

from tests.engines.live.http_engine import PATIENCE_S
from tests.engines.live.router.comparing import Reply, ask, body_of, through
from tests.engines.live.router.fleet import BLOCK_TOKENS, MODEL, Fleet
from tests.engines.live.router.kinds import CALL, CHAT, COMPLETIONS, KINDS, NAMED, PREFIX, PROMPT, RESPONSES, TIME, WEATHER
from tests.engines.live.vllm.engines import PATIENT
from tests.system.running import until

ROLES: Final = {"one engine": ("both", "both"), "two engines": ("prefill", "decode")}


FLEET: Final = {"settings": PATIENT | {"prefill_wait_s": 30}}


@pytest.fixture(scope="module", autouse=True)
def known(fleet: Fleet) -> None:
    """The router learns of an engine by its first answer."""
    through(fleet.url, COMPLETIONS, PROMPT)


def compare(fleet: Fleet, kind: str) -> Reply:
    """Each engine is asked once before: then all of them have the prompt's blocks, and `cached_tokens` is the same."""
    path, members, _ = KINDS[kind]
    for _ in range(2):
        direct = [ask(server.url, path, body_of(members)) for server in fleet.servers]
    routed = through(fleet.url, path, members)
    for expected in direct:
        assert (routed.status, routed.content_type) == (expected.status, expected.content_type)
        assert routed.body == expected.body
    return routed


@pytest.fixture(scope="module", params=ROLES)
def way(fleet: Fleet, request: pytest.FixtureRequest) -> str:
    """Restart the sidecars with this division of work between the servers."""
    fleet.start_sidecars(roles=ROLES[request.param])
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_answers_as_the_engine_does(fleet: Fleet, way: str, kind: str) -> None:
    routed = compare(fleet, kind)
    assert routed.headers["x-kvstore-routed-by"] == KINDS[kind][2]
    decision = json.loads(routed.headers["x-kvstore-decision"])
    assert (decision["prefill"] != decision["decode"]) == (way == "two engines")


def converse(url: str, subject: str) -> list[dict[str, Any]]:
    """A chat of three turns: the model calls a tool, reads its answer and writes, and is asked once more. Return the answers."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You know the weather of every city, {subject} above all. " * 4},
        {"role": "user", "content": f"How is the weather in {subject}?"},
    ]
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 100, "tools": [WEATHER, TIME], "parallel_tool_calls": False}
    answers: list[dict[str, Any]] = []
    for choice, then in (
        (NAMED, {"role": "tool", "tool_call_id": CALL["id"], "content": '{"sky": "rain", "wind": 4}'}),
        ("auto", {"role": "user", "content": "And tomorrow?"}),
        ("none", None),
    ):
        reply = ask(url, CHAT, {**asked, "messages": messages, "tool_choice": choice})
        assert reply.status == 200, reply
        answers.append({**reply.body, "decision": json.loads(reply.headers.get("x-kvstore-decision", "{}"))})
        message = reply.body["choices"][0]["message"]
        calls = [{**call, "id": CALL["id"]} for call in message.get("tool_calls") or []]
        messages += [{"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}, then or {}]
    return answers


def test_a_chat_of_three_turns_with_tools_is_the_engines(fleet: Fleet, way: str) -> None:
    routed, direct = converse(fleet.url, way), converse(fleet.servers[0].url, way)
    assert [turn["choices"] for turn in routed] == [turn["choices"] for turn in direct]
    assert [turn["usage"]["prompt_tokens"] for turn in routed] == [turn["usage"]["prompt_tokens"] for turn in direct]
    assert routed[0]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_the_next_turn_goes_where_the_chat_is(fleet: Fleet, way: str) -> None:
    """Once the scheduler has the engine's events: all full blocks of the prompt are found, and the engine computes none of them."""
    messages = [{"role": "user", "content": f"The chat by {way}: " + "how is the weather in Oslo? " * 12}]
    members = {"messages": messages, "max_tokens": 8, "tools": [WEATHER]}
    blocks = through(fleet.url, CHAT, members).body["usage"]["prompt_tokens"] // BLOCK_TOKENS

    def prefix() -> Reply:
        return through(fleet.url, CHAT, members)

    until(lambda: json.loads(prefix().headers["x-kvstore-decision"])["prefix_blocks"] == blocks, "the prompt's blocks", PATIENCE_S)
    assert prefix().body["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK_TOKENS


@pytest.mark.parametrize("members", [{}, {"stream": True}])
def test_a_response_is_continued_by_the_engine_that_keeps_it(fleet: Fleet, way: str, members: dict[str, Any]) -> None:
    first = through(fleet.url, RESPONSES, {"input": f"How is {way}?", "max_output_tokens": 12, **members})
    assert (first.status, first.headers["x-kvstore-routed-by"]) == (200, "load; api")
    (keeper,) = [
        server.url for server in fleet.servers if ask(server.url, f"{RESPONSES}/{first.response_id}", None, method="GET").status == 200
    ]
    follow = {"input": "And tomorrow?", "max_output_tokens": 12, "previous_response_id": first.response_id}
    for _ in range(4):
        routed = through(fleet.url, RESPONSES, follow)
        assert (routed.status, routed.headers["x-kvstore-routed-by"]) == (200, "response")
    kept = f"{RESPONSES}/{routed.response_id}"
    assert ask(fleet.url, kept, None, method="GET").body == ask(keeper, kept, None, method="GET").body


def test_every_prompt_was_tokenised_as_the_engine_did(fleet: Fleet, way: str) -> None:
    """After all of the above."""
    stats = ask(fleet.url, "/stats", None, method="GET").body
    assert (stats["token_mismatches"], stats["failed"]) == (0, 0), way
    assert set(stats["routed_by_load"]) == {
        "no_engine",
        *(routed.removeprefix("load; ") for _, _, routed in KINDS.values() if routed != PREFIX),
    }
