"""Promises of openai_api.py: requests of clients, and errors of the router."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.instances.client import Refusal
from kvstore.protocol.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from kvstore.router.openai_api import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MAX_RETRY_AFTER_S,
    RESPONSES,
    TBT_HEADER,
    TTFT_HEADER,
    ApiRequest,
    decode_body,
    parse_json,
    parse_request,
    parse_slo,
    prefill_body,
    problem_of,
    refusal_problem,
    whole_body,
)
from kvstore.scheduler.request import Reason, Slo
from tests.router.scripted import chat, completion

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def request(path: str, **members: Any) -> ApiRequest:
    return parse_request(path, json.dumps(members).encode(), {})


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, '{"model": "m"}'.encode("utf-16")])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="the body is not JSON: "):
        parse_json(body)


@pytest.mark.parametrize(
    ("path", "members", "limit"),
    [
        (CHAT, {"max_completion_tokens": 3, "max_tokens": 5}, 3),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 5}, 5),
        (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": 3}, 5),
        (RESPONSES, {"max_output_tokens": 4}, 4),
        (EMBEDDINGS, {"max_tokens": 4}, None),
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"max_tokens": "many"}, None),
        (COMPLETIONS, {"max_tokens": -1}, None),
    ],
)
def test_the_output_limit_has_another_name_on_each_path(path: str, members: dict[str, Any], limit: int | None) -> None:
    assert request(path, **members).max_output_tokens == limit


@pytest.mark.parametrize(
    ("path", "members", "is_splittable"),
    [
        (CHAT, {"tools": [{}], "logprobs": True, "stream": True, "response_format": {"type": "json_object"}, "n": 1}, True),
        (COMPLETIONS, {"prompt": ["one"], "best_of": None, "echo": False}, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, True),
        (COMPLETIONS, {"prompt": ["one", "two"]}, False),
        (COMPLETIONS, {"prompt": [[1], [2]]}, False),
        (CHAT, {"n": 2}, False),
        (COMPLETIONS, {"best_of": 2}, False),
        (COMPLETIONS, {"echo": True}, False),
        (CHAT, {"prompt_logprobs": 0}, False),
        (CHAT, {"use_beam_search": True}, False),
        (CHAT, {"kv_transfer_params": {}}, False),
        (CHAT, {"kv_transfer_params": {"retention": {"priority": 70}}}, True),
        (CHAT, {"kv_transfer_params": {"retention": {}, "do_remote_decode": True}}, False),
        (CHAT, {"kv_transfer_params": [1]}, False),
        (RESPONSES, {"input": "Hi"}, False),
        (EMBEDDINGS, {"input": "Hi"}, False),
    ],
)
def test_two_engines_share_only_one_plain_sequence(path: str, members: dict[str, Any], *, is_splittable: bool) -> None:
    assert request(path, **members).is_splittable == is_splittable


def test_a_prefill_is_the_same_request_for_one_token() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True}, min_tokens=7, max_tokens=9, seed=3, novel={"a": [1]})
    body = json.loads(prefill_body(asked, {"do_remote_decode": True}))
    ours = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    assert body == {"model": "m", "messages": asked.members["messages"], "seed": 3, "novel": {"a": [1]}, **ours}
    assert "max_completion_tokens" not in json.loads(prefill_body(completion(), {}))


MEMBERS = st.dictionaries(st.text().filter(lambda name: name != "kv_transfer_params"), JSON)


@given(MEMBERS, st.sampled_from(["", " ", "\n\t"]))
def test_a_decode_has_the_clients_bytes_and_our_parameters(members: dict[str, Any], space: str) -> None:
    body = (space + json.dumps(members) + space).encode()
    made = decode_body(parse_request(CHAT, body, {}), {"blocks": 3})
    assert json.loads(made) == {**members, "kv_transfer_params": {"blocks": 3}}
    assert made.startswith(body.rpartition(b"}")[0])


HINTS = {"priority": 70, "session": "s"}


def transfer_params(body: bytes) -> Any:
    return json.loads(body).get("kv_transfer_params")


@pytest.mark.parametrize("own", [None, {"retention": {"priority": 10}}])
def test_hints_of_the_header_go_to_both_engines(own: Any) -> None:
    asked = replace(request(CHAT, kv_transfer_params=own), retention=HINTS)
    assert asked.is_splittable
    for body in (prefill_body(asked, {"blocks": 3}), decode_body(asked, {"blocks": 3})):
        assert transfer_params(body) == {"blocks": 3, "retention": HINTS}


def test_hints_of_the_body_go_to_both_engines() -> None:
    asked = request(CHAT, kv_transfer_params={"retention": HINTS})
    for body in (prefill_body(asked, {"blocks": 3}), decode_body(asked, {"blocks": 3})):
        assert transfer_params(body) == {"blocks": 3, "retention": HINTS}


def test_one_engine_gets_the_bytes_of_a_client_without_header() -> None:
    asked = request(CHAT, kv_transfer_params={"retention": HINTS})
    assert whole_body(asked) is asked.body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_one_engine_gets_hints_beside_the_clients_parameters(path: str) -> None:
    asked = replace(request(path, a=1, kv_transfer_params={"b": 2, "retention": {"priority": 10}}), retention=HINTS)
    assert json.loads(whole_body(asked)) == {"a": 1, "kv_transfer_params": {"b": 2, "retention": HINTS}}


@pytest.mark.parametrize(("path", "own"), [(EMBEDDINGS, None), (CHAT, [1]), (CHAT, "all")])
def test_hints_do_not_change_a_body_that_cannot_have_them(path: str, own: Any) -> None:
    asked = replace(request(path, kv_transfer_params=own), retention=HINTS)
    assert whole_body(asked) is asked.body


@given(st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES]), MEMBERS)
def test_any_json_object_is_a_request(path: str, members: dict[str, Any]) -> None:
    body = json.dumps(members).encode()
    asked = parse_request(path, body, {"authorization": "Bearer x", "cookie": "y"})
    assert (asked.body, asked.headers) == (body, {"authorization": "Bearer x"})
    assert asked.max_output_tokens is None or asked.max_output_tokens > 0
    assert asked.is_splittable in (True, False)


def test_slos_come_from_the_headers_else_the_default() -> None:
    default = Slo(ttft_s=2.0)
    assert parse_slo({}, default) == default
    assert parse_slo({TTFT_HEADER: "0.5", TBT_HEADER: "1e-2"}, default) == Slo(ttft_s=0.5, tbt_s=0.01)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf"])
def test_an_slo_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the header {TTFT_HEADER} must be a positive number of seconds, not '{text}'"):
        parse_slo({TTFT_HEADER: text}, Slo())


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (InvalidArgument("x"), 400, {}),
        (Unavailable("x"), 503, {"Retry-After": "1"}),
        (Unreachable("x"), 503, {"Retry-After": "1"}),
        (DeadlineExceeded("x"), 504, {"Retry-After": "1"}),
        (Unauthorized("x"), 502, {}),
        (ProtocolError("x"), 500, {}),
        (KVStoreError("x"), 500, {}),
    ],
)
def test_the_status_says_who_must_act(error: KVStoreError, status: int, retry_after: dict[str, str]) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.headers()) == (status, retry_after)
    assert problem.body()["error"]["message"].endswith("x")


@pytest.mark.parametrize(
    ("refusal", "message", "retry_after"),
    [
        (Refusal(Reason.TTFT, 12.34, 5.0), "rejected by the scheduler: ttft would be 12.34 s, the limit is 5 s", "8"),
        (Refusal(Reason.TTFT, 1e9, 5.0), "rejected by the scheduler: ttft would be 1e+09 s, the limit is 5 s", str(MAX_RETRY_AFTER_S)),
        (Refusal(Reason.TTFT, 5.01, 5.0), "rejected by the scheduler: ttft would be 5.01 s, the limit is 5 s", "1"),
        (Refusal(Reason.CAPACITY, 9000, 8000), "rejected by the scheduler: capacity would be 9000 tokens, the limit is 8000 tokens", "1"),
        (Refusal(Reason.PREFILL_LOAD, 12.5, 10), "rejected by the scheduler: prefill_load would be 12.5 s, the limit is 10 s", "3"),
        (Refusal(Reason.DECODE_LOAD, 4.5, 1), "rejected by the scheduler: decode_load would be 4.5 s, the limit is 1 s", "1"),
    ],
)
def test_a_rejection_names_reason_value_and_limit(refusal: Refusal, message: str, retry_after: str) -> None:
    problem = refusal_problem(refusal)
    assert problem.status == 429
    assert problem.headers() == {"Retry-After": retry_after}
    error = problem.body()["error"]
    assert (error["message"], error["code"], error["reason"]) == (message, refusal.reason.value, refusal.reason.value)
    assert (error["value"], error["limit"]) == (refusal.value, refusal.limit)
