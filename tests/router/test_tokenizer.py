"""Promises of tokenizer.py: a prompt's tokens are the engine's, or it is routed by load."""

import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.router.engines import Engines
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import parse_request
from kvstore.router.tokenizer import NOT_RENDERED, LoadReason, PromptCache, PromptTokenizer, TokenizedPrompt, estimate_tokens, prompt_source
from tests.ports import free_ports
from tests.router.scripted import PROMPT, SETTINGS, Act, ScriptedEngine, answers, chat, completion, hangs_up, prompt_tokens, run, says
from tests.router.test_openai_api import JSON

FUNCTION = {"name": "f", "arguments": "{}"}
CALL: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}
NAMING = NamespaceNaming(Namespace(model="m", dtype="bfloat16", block_tokens=4))
KEYS = NAMING.block_keys(PROMPT)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids_are_the_prompt(prompt: Any) -> None:
    assert prompt_source(completion(prompt)) == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["text", ["text"]])
def test_a_text_is_tokenised_as_a_completion_is(prompt: Any) -> None:
    source = prompt_source(completion(prompt, add_special_tokens=False, temperature=0))
    assert isinstance(source, bytes)
    assert json.loads(source) == {"model": "m", "prompt": "text", "add_special_tokens": False}


def test_a_chat_is_tokenised_with_all_that_may_change_it() -> None:
    answer, parts = {"role": "tool", "tool_call_id": "1", "content": "4"}, [{"type": "text", "text": "Hi"}]
    messages: list[dict[str, Any]] = [CALL, answer, {"role": "user", "content": parts}]
    rendered = {"tools": [], "tool_choice": "none", "chat_template_kwargs": {"a": 1}, "novel": 1}
    asked = chat(*messages, **rendered, **{name: True for name in NOT_RENDERED if name != "cache_salt"})
    source = prompt_source(asked)
    assert isinstance(source, bytes)
    assert json.loads(source) == {"model": "m", "messages": messages, **rendered}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"cache_salt": "s"}, LoadReason.SALT),
        ({"reasoning_effort": "low"}, LoadReason.MEMBER),
        ({"documents": []}, LoadReason.MEMBER),
        ({"add_generation_prompt": False}, LoadReason.MEMBER),
        ({"truncate_prompt_tokens": 5}, LoadReason.MEMBER),
        ({"messages": "Hi"}, LoadReason.TOKENIZE),
        ({"messages": ["Hi"]}, LoadReason.TOKENIZE),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, LoadReason.CONTENT),
        ({"messages": [{"role": "user", "content": {}}]}, LoadReason.CONTENT),
    ],
)
def test_a_chat_that_tokenize_does_not_know_whole_goes_by_load(members: dict[str, Any], reason: LoadReason) -> None:
    assert prompt_source(chat(**members)) is reason


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "tools", "input", "cache_salt"]), JSON))
def test_any_request_has_a_source_and_an_estimate(members: dict[str, Any]) -> None:
    body = json.dumps(members).encode()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert isinstance(prompt_source(parse_request(path, body, {})), bytes | list | LoadReason)
    assert estimate_tokens(members) >= 1


@asynccontextmanager
async def tokenizer(*, learn: bool = True) -> AsyncIterator[tuple[PromptTokenizer, ScriptedEngine, RouterCounters]]:
    engines, counters = Engines(SETTINGS), RouterCounters()
    with ThreadPoolExecutor(1) as threads:
        async with ScriptedEngine() as engine:
            tokens = PromptTokenizer(engines, NAMING, threads, counters)
            if learn:
                tokens.learn(engine.address)
            yield tokens, engine, counters
            await engines.close()


async def test_a_chat_has_the_tokens_that_the_engine_gives() -> None:
    async with tokenizer() as (tokens, engine, counters):
        tools = [{"type": "function", "function": {"name": "f"}}]
        asked = chat(temperature=0, tools=tools, chat_template_kwargs={"enable_thinking": False}, stream=True)
        expected = prompt_tokens(dict(asked.members))
        assert await tokens.prompt(asked) == TokenizedPrompt(len(expected), NAMING.block_keys(expected), is_by_engine=True)
        [body] = engine.tokenized
        assert body == {name: asked.members[name] for name in ("model", "messages", "tools", "chat_template_kwargs")}
        assert counters.routed_by_load == {}


async def test_the_whole_request_is_remembered_and_no_part_of_it() -> None:
    async with tokenizer() as (tokens, engine, _):
        for asked in (chat(), chat(seed=1), chat(tools=[]), chat({"role": "user", "content": "Hi!"}), chat(stream=True)):
            await tokens.prompt(asked)
        assert len(engine.tokenized) == 3


@pytest.mark.parametrize(
    ("act", "asked"),
    [
        (answers(404, "Not Found"), 1),
        (answers(400, "no template"), 1),
        (answers(503, "later"), 2),
        (hangs_up, 2),
        (says("{}"), 2),
        (says("[]"), 2),
        (says('{"tokens": ["x"]}'), 2),
        (says('{"tokens": []}'), 2),
    ],
)
async def test_without_tokens_of_the_engine_load_decides(act: Act, asked: int) -> None:
    async with tokenizer() as (tokens, engine, counters):
        engine.tokenizing.extend([act, act])
        assert (await tokens.prompt(completion())).load_reason is LoadReason.TOKENIZE
        assert len(engine.tokenized) == asked
        engine.tokenizing.clear()
        assert (await tokens.prompt(completion())).load_reason is None
        assert counters.routed_by_load == {"tokenize": 1}


async def test_another_engine_is_asked_where_one_is_gone() -> None:
    async with tokenizer(learn=False) as (tokens, engine, _):
        tokens.learn(f"http://127.0.0.1:{free_ports(1)[0]}")
        tokens.learn(engine.address)
        assert await tokens.prompt(completion()) == TokenizedPrompt(len(PROMPT), KEYS, is_by_engine=True)


def test_a_mismatch_turns_exact_tokenising_off(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with tokenizer() as (tokens, _, counters):
            exact = await tokens.prompt(completion())
            tokens.verify(exact, len(PROMPT))
            tokens.verify(exact, None)
            tokens.verify(await tokens.prompt(completion(PROMPT)), 1)  # ids of the client's own
            assert counters.token_mismatches == 0
            tokens.verify(exact, len(PROMPT) + 1)
            tokens.verify(exact, len(PROMPT) + 1)
            assert counters.token_mismatches == 2
            assert (await tokens.prompt(completion())).load_reason is LoadReason.MISMATCH
            assert (await tokens.prompt(completion(PROMPT))).keys == KEYS

    with caplog.at_level(logging.WARNING):
        run(test())
    assert len(caplog.records) == 1
    assert "counted 16 tokens in a prompt for which its /tokenize returned 15" in caplog.text


def test_a_cache_of_prompts_evicts_the_least_recently_used() -> None:
    cache = PromptCache(6)
    one, two, large = TokenizedPrompt(4, [b"1"]), TokenizedPrompt(4, [b"2"]), TokenizedPrompt(4, [b"3"] * 2)
    cache.put(b"a", one)
    cache.put(b"b", two)
    cache.put(b"a", two)
    assert cache.get(b"a") is one
    cache.put(b"c", large)
    assert [cache.get(digest) for digest in (b"a", b"b", b"c")] == [one, None, large]
    cache.put(b"d", TokenizedPrompt(40, [b"4"] * 10))
    assert [cache.get(digest) for digest in (b"a", b"c", b"d")] == [None, None, None]
