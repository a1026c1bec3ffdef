"""Promises of problems.py."""

import pytest

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
from kvstore.router.openai_api import MAX_RETRY_AFTER_S, problem_of, refusal_problem
from kvstore.scheduler.request import Reason


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
