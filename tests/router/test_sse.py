"""Promises of sse.py."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kvstore.router.answer_reader import DONE, EventParser, done, event


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
