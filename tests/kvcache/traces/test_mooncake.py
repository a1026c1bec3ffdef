"""Promises of mooncake.py."""

import json
from pathlib import Path

import pytest

from kvstore.kvcache.traces.mooncake import MAX_ID, MAX_LINE_BYTES, TraceRequest, count_requests, parse_request, read_trace
from kvstore.protocol.errors import TraceError

GOOD = {"timestamp": 27000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 14, MAX_ID]}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def test_requests_come_in_the_order_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n" + line(timestamp=27000.5, hash_ids=[], conversation="ignored") + b"\n")
    assert list(read_trace(path)) == [TraceRequest(27000, 1030, 7, (0, 14, MAX_ID)), TraceRequest(27000.5, 1030, 7, ())]


def test_the_last_line_may_lack_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n" + line())
    assert len(list(read_trace(path))) == count_requests(path) == 2


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert list(read_trace(tmp_path / "empty")) == []
    assert count_requests(tmp_path / "empty") == 0


@pytest.mark.promise("input-untrusted")
def test_cut_off_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n" + line() + b"\n" + line()[:40])
    requests = read_trace(path)
    assert [next(requests).input_length for _ in range(2)] == [1030, 1030]
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3: not JSON, or cut off"):
        next(requests)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"\n", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{}", "not UTF-8|not JSON"),
        (b'"\xff"', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "not JSON"),
        (without("timestamp"), "no timestamp"),
        (without("hash_ids"), "no hash_ids"),
        (without("input_length"), "no input_length"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=10**400), r"timestamp is 10{39}\.\.\., not a number of milliseconds"),
        (line(input_length=10**400), r"input_length is 10{39}\.\.\., not a number of tokens"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        (line(timestamp="0"), "timestamp is '0'"),
        (line(input_length=1.5), "input_length is 1.5"),
        (line(output_length=-1), "output_length is -1"),
        (line(output_length=True), "output_length is True"),
        (line(hash_ids=3), "hash_ids is not a list"),
        (line(hash_ids=[1, "2"]), "hash_ids is not a list"),
        (line(hash_ids=[-1]), "hash_ids is not a list"),
        (line(hash_ids=[MAX_ID + 1]), "hash_ids is not a list"),
    ],
)
def test_a_line_that_is_not_exactly_a_request_is_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        parse_request(text)


def test_a_line_of_any_length_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b" " * (MAX_LINE_BYTES + 2))
    with pytest.raises(TraceError, match=f"line 1: longer than {MAX_LINE_BYTES} bytes"):
        next(read_trace(path))


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*absent: No such file"):
        next(read_trace(tmp_path / "absent"))
    with pytest.raises(TraceError, match=r"cannot read the trace .*: Is a directory"):
        count_requests(tmp_path)
