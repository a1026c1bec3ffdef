"""Promises of orders.py."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.router.orders import TBT_HEADER, TTFT_HEADER, parse_chat, parse_completion, parse_json, parse_slo
from kvstore.scheduler.request import Slo

BODY: dict[str, Any] = {"model": "m", "prompt": "text"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOO_LARGE = 1 << 31


@pytest.mark.parametrize(
    ("prompt", "read"), [("a text", "a text"), ([1, 2], [1, 2]), (["one text"], "one text"), ([[1, 2]], [1, 2]), ([], []), ("", "")]
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_one_of_these(prompt: Any, read: str | list[int]) -> None:
    assert parse_completion({"model": "m", "prompt": prompt}).prompt == read


@pytest.mark.parametrize("prompt", [None, 1, {}, [1, "x"], [True], [1.0], [-1], [TOO_LARGE], [["x"]], [None]])
def test_another_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="prompt is a text or a list of token ids from 0 to 2147483647"):
        parse_completion({"model": "m", "prompt": prompt})


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2], [3]]])
def test_several_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"prompt has {len(prompt)} prompts: send each in a request of its own"):
        parse_completion({"model": "m", "prompt": prompt})


def test_what_engines_understand_goes_on_to_them_and_what_changes_nothing_does_not() -> None:
    order = parse_completion({**BODY, "temperature": 0.5, "stop": ["x"], "seed": None, "user": "u", "n": 1, "echo": False, "stream": True})
    assert order.sampling == {"temperature": 0.5, "stop": ["x"]}
    assert order.stream
    assert not order.is_chat
    assert order.max_tokens is None


@pytest.mark.parametrize(
    "member", [{"n": 2}, {"n": True}, {"logprobs": 0}, {"echo": True}, {"tools": [{}]}, {"response_format": {"type": "json_object"}}]
)
def test_what_cannot_be_kept_is_refused_not_ignored(member: dict[str, Any]) -> None:
    [name] = member
    with pytest.raises(InvalidArgument, match=f"{name} is served only as .*: a request gets one plain answer"):
        parse_completion({**BODY, **member})


@pytest.mark.parametrize("nested", [b"[[1]]", b'{"a": {}}', b'{"a": []}', b"[" * 980 + b"]" * 980])
@pytest.mark.parametrize("name", ["stop", "logit_bias", "tools", "max_tokens"])
def test_what_is_nested_is_refused_by_name_however_deep(name: str, nested: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} |not JSON"):  # the deepest may be too deep to be read, too
        parse_completion(parse_json(b'{"model": "m", "prompt": "text", "%s": %s}' % (name.encode(), nested)))


@pytest.mark.parametrize("members", [{"stop": ["x", "y"], "logit_bias": {"5": -1.5}}, {"stop": "x", "stop_token_ids": [1, 2]}])
def test_lists_and_objects_of_plain_values_go_on_to_engines(members: dict[str, Any]) -> None:
    assert parse_completion({**BODY, **members}).sampling == members


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"modle": "m"}, "unknown member 'modle'"),
        ({"messages": []}, "unknown member 'messages'"),
        ({"model": 1}, "model is a text"),
        ({"stream": 1}, "stream is true or false"),
        ({"max_tokens": 0}, "max_tokens is a whole number of at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens is a whole number of at least 1, not true"),
        ({"max_tokens": 1.5}, "max_tokens is a whole number of at least 1, not 1.5"),
        ({"stream_options": []}, 'stream_options is {"include_usage": true or false}'),
        ({"stream_options": {"include_usage": 1}}, 'stream_options is {"include_usage": true or false}'),
        ({"stream_options": {"other": True}}, 'stream_options is {"include_usage": true or false}'),
    ],
)
def test_a_wrong_member_is_named(member: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_completion({**BODY, **member})
    assert str(refused.value) == message


def test_a_chat_has_a_prompt_and_either_name_of_its_limit() -> None:
    order = parse_chat({**CHAT, "max_completion_tokens": 3, "max_tokens": 5, "stream_options": {"include_usage": True}})
    assert order.prompt == "<|user|>\nHi\n<|assistant|>\n"
    assert order.is_chat
    assert order.max_tokens == 3
    assert order.include_usage
    assert parse_chat({**CHAT, "max_tokens": 5}).max_tokens == 5


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"temperature": NaN}', b'{"temperature": -1e999}', b"[" * 100_000, b"9" * 5000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="the body is not JSON: "):
        parse_json(body)


def test_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the body is not a JSON object"):
        parse_json(b"[]")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n", "stop", "tools", "other"])


@given(st.dictionaries(NAMES, JSON))
def test_whatever_is_sent_is_an_order_or_refused(body: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            order = parse(body)
        except InvalidArgument:
            continue
        assert order.model == body["model"]
        assert order.max_tokens is None or order.max_tokens >= 1


def test_slos_come_from_the_headers_else_the_default() -> None:
    default = Slo(ttft_s=2.0)
    assert parse_slo({}, default) == default
    assert parse_slo({TTFT_HEADER: "0.5", TBT_HEADER: "1e-2"}, default) == Slo(ttft_s=0.5, tbt_s=0.01)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf"])
def test_an_slo_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the header {TTFT_HEADER} is a number of seconds above 0, not '{text}'"):
        parse_slo({TTFT_HEADER: text}, Slo())
