"""Promises of prompt_source.py."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.router.openai_api import parse_request
from kvstore.router.tokenizer import NOT_RENDERED, LoadReason, estimate_tokens, prompt_source
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
