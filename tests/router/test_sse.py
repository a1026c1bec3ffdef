"""Promises of sse.py."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.router.sse import DONE, MAX_EVENT_BYTES, EventParser, done, event


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


def test_the_frame_of_an_event() -> None:
    assert event({"a": "\n"}) + done() == b'data: {"a":"\\n"}\n\ndata: [DONE]\n\n'


def test_other_fields_comments_and_line_ends_are_passed_over() -> None:
    assert parsed(b": hello\r\nevent: token\r\nid: 7\r\ndata:one\r\ndata: two\r\n\r\n\r\nretry: 1\n\ndata: three\n\ndata: unfinished") == [
        "one\ntwo",
        "three",
    ]


@pytest.mark.parametrize("stream", [b"x" * (MAX_EVENT_BYTES + 1), b"data: 0123456789\n" * (MAX_EVENT_BYTES // 10)])
def test_an_event_without_end_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"an event of more than {MAX_EVENT_BYTES} bytes"):
        parsed(stream)


def test_an_event_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ProtocolError, match="an event is not UTF-8"):
        parsed(b"data: \xff\n\n")
