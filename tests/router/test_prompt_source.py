"""Promises of prompt_source.py."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.router.prompt_source import NOT_RENDERED, LoadReason, estimate_tokens, prompt_source
from kvstore.router.requests import EMBEDDINGS, RESPONSES, parse_request
from tests.router.scripted import chat, completion
from tests.router.test_requests import JSON

FUNCTION = {"name": "f", "arguments": "{}"}
CALL: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_token_ids_are_the_prompt(prompt: Any) -> None:
    assert prompt_source(completion(prompt)) == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["text", ["text"]])
def test_a_text_is_tokenised_as_a_completion_is(prompt: Any) -> None:
    source = prompt_source(completion(prompt, add_special_tokens=False, temperature=0))
    assert isinstance(source, bytes)
    assert json.loads(source) == {"model": "m", "prompt": "text", "add_special_tokens": False}


@pytest.mark.parametrize("prompt", [None, 1, [], {}, [1, "x"], [True], [-1], [1 << 31], [1.5]])
def test_another_prompt_is_left_to_the_engine(prompt: Any) -> None:
    assert prompt_source(parse_request("/v1/completions", json.dumps({"prompt": prompt}).encode(), {})) is LoadReason.TOKENIZE


def test_a_chat_is_tokenised_with_all_that_may_change_it() -> None:
    answer, parts = {"role": "tool", "tool_call_id": "1", "content": "4"}, [{"type": "text", "text": "Hi"}]
    messages: list[dict[str, Any]] = [CALL, answer, {"role": "user", "content": parts}]
    rendered = {"tools": [], "tool_choice": "none", "chat_template_kwargs": {"a": 1}, "novel": 1}
    asked = chat(*messages, **rendered, **{name: True for name in NOT_RENDERED if name != "cache_salt"})
    source = prompt_source(asked)
    assert isinstance(source, bytes)
    assert json.loads(source) == {"model": "m", "messages": messages, **rendered}


@pytest.mark.parametrize(
    ("reasoning", "sent"),
    [
        ({"reasoning_content": "y"}, {"reasoning_content": "y", "reasoning": "y"}),
        ({"reasoning_content": "y", "reasoning": "z"}, {"reasoning_content": "y", "reasoning": "z"}),
        ({"reasoning_content": None}, {"reasoning_content": None}),
    ],
)
def test_reasoning_has_the_names_of_both_engines(reasoning: dict[str, Any], sent: dict[str, Any]) -> None:
    source = prompt_source(chat({"role": "assistant", "content": "x", **reasoning}))
    assert isinstance(source, bytes)
    assert json.loads(source)["messages"] == [{"role": "assistant", "content": "x", **sent}]


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


def test_several_prompts_and_other_paths_go_by_load() -> None:
    assert prompt_source(completion(["a", "b"])) is LoadReason.SEVERAL_PROMPTS
    assert {prompt_source(parse_request(path, b'{"input": "x"}', {})) for path in (EMBEDDINGS, RESPONSES)} == {LoadReason.API}


def test_an_estimate_goes_by_characters_and_ids() -> None:
    url = "data:image/png;base64," + "A" * 10_000
    assert estimate_tokens({"prompt": "x" * 40}) == 10
    assert estimate_tokens({"prompt": [1] * 40}) == 40
    assert estimate_tokens({"input": ["x" * 20, "y" * 20], "model": "m" * 100}) == 10
    assert estimate_tokens({"messages": [{"content": [{"image_url": {"url": url}}, {"text": "x" * 40}]}]}) == 10
    assert estimate_tokens({"messages": [{"content": None}]}) == 1


@given(st.dictionaries(st.sampled_from(["prompt", "messages", "tools", "input", "cache_salt"]), JSON))
def test_any_request_has_a_source_and_an_estimate(members: dict[str, Any]) -> None:
    body = json.dumps(members).encode()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert isinstance(prompt_source(parse_request(path, body, {})), bytes | list | LoadReason)
    assert estimate_tokens(members) >= 1
