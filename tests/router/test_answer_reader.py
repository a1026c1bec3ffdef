"""Promises of answer_reader.py: events however they are cut, and what the router reads of an answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.router.answer_reader import DONE, MAX_EVENT_BYTES, AnswerReader, EventParser, done, event
from tests.router.test_openai_api import JSON

USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def parsed(data: bytes, cuts: list[int] | None = None) -> list[str]:
    parser, found, begin = EventParser(), [], 0
    for end in [*sorted(cuts or []), len(data)]:
        found += parser.feed(data[begin:end])
        begin = end
    return found


@given(st.lists(st.text()), st.data())
def test_what_is_framed_is_parsed_however_it_is_cut(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(event({"text": text}) for text in texts) + done()
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    *events, last = parsed(stream, cuts)
    assert [json.loads(found)["text"] for found in events] == texts
    assert last == DONE


def test_other_fields_comments_and_line_ends_are_passed_over() -> None:
    assert parsed(b": hello\r\nevent: token\r\nid: 7\r\ndata:one\r\ndata: two\r\n\r\n\r\nretry: 1\n\ndata: three\n\ndata: unfinished") == [
        "one\ntwo",
        "three",
    ]


def whole(answer: Any) -> AnswerReader:
    reader = AnswerReader(is_stream=False)
    reader.feed(json.dumps(answer).encode())
    return reader


def test_a_whole_answer_says_its_usage() -> None:
    reader = whole({"choices": [{}], "usage": USAGE})
    assert (reader.prompt_tokens, reader.output_tokens(), reader.cached_tokens) == (10, 3, 8)
    assert (reader.failure, reader.response_id) == (None, None)


def test_a_response_says_its_id_and_usage_under_other_names() -> None:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    reader = whole({"id": "resp_1", "object": "response", "error": {"message": "x"}, "usage": usage})
    assert (reader.response_id, reader.prompt_tokens, reader.output_tokens(), reader.cached_tokens) == ("resp_1", 7, 2, 4)
    assert reader.failure is None, "a response that failed is an answer"
    streamed = AnswerReader(is_stream=True)
    streamed.feed(event({"type": "response.created", "response": {"id": "resp_2", "object": "response", "usage": None}}))
    assert streamed.response_id == "resp_2"


@given(st.integers(1, 60))
def test_a_stream_is_read_however_it_is_cut(step: int) -> None:
    frames = b"".join([*[event({"choices": [{"index": 0}]})] * 3, event({"choices": [], "usage": USAGE}), done()])
    reader = AnswerReader(is_stream=True)
    for start in range(0, len(frames), step):
        assert not reader.is_done
        reader.feed(frames[start : start + step])
    assert (reader.prompt_tokens, reader.completion_tokens, reader.parts, reader.is_done) == (10, 3, 3, True)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ({"error": {"message": "CUDA error"}}, "CUDA error"),
        ({"error": "text"}, "text"),
        ({"choices": [{"finish_reason": "abort"}]}, "it dropped the request: abort"),
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "error"}]}, "it dropped the request: error"),
        ({"choices": [{"finish_reason": "length"}], "error": None}, None),
    ],
)
def test_a_request_that_the_engine_dropped_is_a_failure(answer: Any, failure: str | None) -> None:
    assert whole(answer).failure == failure


@given(JSON)
def test_any_json_is_passed_over(value: Any) -> None:
    whole(value)


def test_a_stream_that_is_none_is_passed_over() -> None:
    reader = AnswerReader(is_stream=True)
    reader.feed(b"data: {\n\ndata: \xff\n\n")
    reader.feed(event({"choices": [{}]}))
    assert reader.parts == 0
    long = AnswerReader(is_stream=True)
    long.feed(b"x" * (MAX_EVENT_BYTES + 1))
    long.feed(event({"choices": [{}]}))
    assert long.parts == 0
