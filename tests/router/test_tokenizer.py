"""Promises of tokenizer.py, with engines on real sockets."""

import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from kvstore.kvcache.namespace import Namespace
from kvstore.kvcache.naming import NamespaceNaming
from kvstore.router.engines import Engines
from kvstore.router.metrics import Counters
from kvstore.router.tokenizer import LoadReason, Prompt, PromptCache, PromptTokenizer
from tests.ports import free_ports
from tests.router.scripted import PROMPT, SETTINGS, Act, ScriptedEngine, answers, chat, completion, hangs_up, prompt_tokens, run, says

NAMING = NamespaceNaming(Namespace(model="m", dtype="bfloat16", block_tokens=4))
KEYS = NAMING.block_keys(PROMPT)


@asynccontextmanager
async def tokenizer(*, learn: bool = True) -> AsyncIterator[tuple[PromptTokenizer, ScriptedEngine, Counters]]:
    engines, counters = Engines(SETTINGS), Counters()
    with ThreadPoolExecutor(1) as threads:
        async with ScriptedEngine() as engine:
            tokens = PromptTokenizer(engines, NAMING, threads, counters)
            if learn:
                tokens.learn(engine.address)
            yield tokens, engine, counters
            await engines.close()


def test_a_chat_has_the_tokens_that_the_engine_gives() -> None:
    async def test() -> None:
        async with tokenizer() as (tokens, engine, counters):
            tools = [{"type": "function", "function": {"name": "f"}}]
            asked = chat(temperature=0, tools=tools, chat_template_kwargs={"enable_thinking": False}, stream=True)
            expected = prompt_tokens(dict(asked.members))
            assert await tokens.prompt(asked) == Prompt(len(expected), NAMING.block_keys(expected), is_by_engine=True)
            [body] = engine.tokenized
            assert body == {name: asked.members[name] for name in ("model", "messages", "tools", "chat_template_kwargs")}
            assert counters.routed_by_load == {}

    run(test())


def test_the_whole_request_is_remembered_and_no_part_of_it() -> None:
    async def test() -> None:
        async with tokenizer() as (tokens, engine, _):
            for asked in (chat(), chat(seed=1), chat(tools=[]), chat({"role": "user", "content": "Hi!"}), chat(stream=True)):
                await tokens.prompt(asked)
            assert len(engine.tokenized) == 3

    run(test())


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
def test_without_tokens_of_the_engine_load_decides(act: Act, asked: int) -> None:
    async def test() -> None:
        async with tokenizer() as (tokens, engine, counters):
            engine.tokenizing.extend([act, act])
            assert (await tokens.prompt(completion())).load_reason is LoadReason.TOKENIZE
            assert len(engine.tokenized) == asked
            engine.tokenizing.clear()
            assert (await tokens.prompt(completion())).load_reason is None
            assert counters.routed_by_load == {"tokenize": 1}

    run(test())


def test_another_engine_is_asked_where_one_is_gone() -> None:
    async def test() -> None:
        async with tokenizer(learn=False) as (tokens, engine, _):
            tokens.learn(f"http://127.0.0.1:{free_ports(1)[0]}")
            tokens.learn(engine.address)
            assert await tokens.prompt(completion()) == Prompt(len(PROMPT), KEYS, is_by_engine=True)

    run(test())


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
    assert "counts 16 tokens in a prompt for which its /tokenize gave 15" in caplog.text


def test_a_cache_of_prompts_evicts_the_least_recently_used() -> None:
    cache = PromptCache(6)
    one, two, large = Prompt(4, [b"1"]), Prompt(4, [b"2"]), Prompt(4, [b"3"] * 2)
    cache.put(b"a", one)
    cache.put(b"b", two)
    cache.put(b"a", two)
    assert cache.get(b"a") is one
    cache.put(b"c", large)
    assert [cache.get(digest) for digest in (b"a", b"b", b"c")] == [one, None, large]
    cache.put(b"d", Prompt(40, [b"4"] * 10))
    assert [cache.get(digest) for digest in (b"a", b"c", b"d")] == [None, None, None]
