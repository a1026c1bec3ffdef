"""Promises of event_file.py: written events are read back, failed writes leave whole lines, and a malformed line is named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.traces import event_file
from kvstore.kvcache.traces.event_file import HEADER, READ, REMOVED, STORED, BlockEvent, EventWriter, LostEvents, is_recording, read_events
from kvstore.protocol.errors import Broken, InvalidArgument, TraceError

EVENT = BlockEvent(READ, 1234.567, "n0", "red", [b"a", b"\0\xff"], [b"", b"a"], [4096, 1])
LINE = {"event": "read", "timestamp": 1, "node": "n", "tenant": "", "keys": ["61"], "parents": [""], "sizes": [7]}

blocks = st.lists(st.tuples(st.binary(min_size=1, max_size=255), st.binary(max_size=255), st.integers(0, 1 << 40)), min_size=1, max_size=4)
events = st.one_of(
    st.builds(LostEvents, st.floats(0, 1e15), st.text(), st.text(), st.none() | st.integers(0, 1 << 60)),
    st.builds(
        lambda kind, time_ms, node, rows: BlockEvent(kind, time_ms, node, "t", *(list(column) for column in zip(*rows, strict=True))),
        st.sampled_from([STORED, READ, REMOVED]),
        st.floats(0, 1e15),
        st.text(),
        blocks,
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in (HEADER, *lines)))
    return path


def line(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**LINE, **changes}.items() if value is not ...}


@given(written=st.lists(st.lists(events, max_size=3), max_size=4))
def test_what_is_written_is_read(written: list[list[BlockEvent | LostEvents]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("events") / "file"
    with EventWriter(path) as writer:
        for part in written:
            writer.write(part)
    assert list(read_events(path)) == [event for part in written for event in part]


def test_lines_are_as_documented(path: Path) -> None:
    with EventWriter(path) as writer:
        writer.write([EVENT, LostEvents(5, "n1", "", None)])
    assert path.read_text() == (
        '{"format":"kvstore events","version":1}\n'
        '{"event":"read","timestamp":1234.567,"node":"n0","tenant":"red","keys":["61","00ff"],"parents":["","61"],"sizes":[4096,1]}\n'
        '{"event":"gap","timestamp":5,"node":"n1","tenant":"","lost":null}\n'
    )


def test_a_write_that_fails_half_way_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventWriter(path) as writer:
        writer.write([EVENT])
        file = writer._file

        class HalfFull:
            """A disk that takes ten bytes more."""

            left = 10

            def write(self, data: memoryview) -> int:
                if not self.left:
                    raise OSError(28, "No space left on device")
                written = file.write(data[: self.left])
                self.left = 0
                return int(written)

            truncate = staticmethod(file.truncate)

        monkeypatch.setattr(writer, "_file", HalfFull())
        with pytest.raises(Broken, match=r"cannot write .*events\.jsonl: No space left on device"):
            writer.write([EVENT, EVENT])
        monkeypatch.setattr(writer, "_file", file)
        assert list(read_events(path)) == [EVENT]
        writer.write([EVENT])
    assert list(read_events(path)) == [EVENT, EVENT]


def test_what_is_no_ordinary_file_is_written_to_all_the_same(path: Path) -> None:
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with EventWriter(path) as writer:
        writer.write([EVENT])
        os.close(end)
        with pytest.raises(Broken, match="Broken pipe"):
            writer.write([EVENT])


def test_a_file_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot write .*: No such file or directory"):
        EventWriter(tmp_path / "away" / "file")


def test_a_recording_is_told_from_a_trace_by_its_first_line(path: Path) -> None:
    assert is_recording(write(path))
    for text in ("", "{}\n", "[1]\n", "\xff\n", '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": []}\n', "{" * 2000):
        path.write_text(text)
        assert not is_recording(path)
    with pytest.raises(TraceError, match="cannot read the trace"):
        is_recording(path.parent)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ('{"event"\n', "not JSON, or cut off"),
        ("[1]\n", "not a JSON object"),
        ("9" * 5000 + "\n", "not JSON, or cut off"),
        (line(event="moved"), "event is 'moved', not stored, read, removed or gap"),
        (line(event=...), "event is None"),
        (line(timestamp=-1), "timestamp is -1, not a number of milliseconds"),
        (line(timestamp=True), "timestamp is True"),
        (line(timestamp=float("nan")), "timestamp is nan"),
        (line(timestamp=10**400), "timestamp is 1000"),
        (line(node=3), "node is 3, not a text"),
        (line(tenant=...), "tenant is None, not a text"),
        (line(event="gap", lost=-1), "lost is -1, neither a number of events nor null"),
        (line(keys="61"), "keys is not a list of hexadecimal keys"),
        (line(keys=["6"]), "keys is not a list of hexadecimal keys"),
        (line(keys=[6]), "keys is not a list of hexadecimal keys"),
        (line(keys=[""]), "keys has a key that is not 1 to 255 bytes long"),
        (line(parents=["00" * 256]), "parents has a key that is not 0 to 255 bytes long"),
        (line(sizes=7), "sizes is not a list of numbers of bytes"),
        (line(sizes=[7.0]), "sizes is not a list of numbers of bytes"),
        (line(sizes=[7, 7]), "1 keys, 1 parents and 2 sizes"),
        (line(keys=[], parents=[], sizes=[]), "0 keys, 0 parents and 0 sizes"),
    ],
)
def test_a_malformed_line_is_named(path: Path, bad: Any, complaint: str) -> None:
    reader = read_events(write(path, line(), bad))
    next(reader)
    with pytest.raises(TraceError) as caught:
        next(reader)
    assert str(caught.value).startswith(f"{path}, line 3: {complaint}")


def test_bytes_that_are_no_text_are_named(path: Path) -> None:
    path.write_bytes(json.dumps(HEADER).encode() + b'\n{"event": "\xff"}\n')
    with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
        list(read_events(path))


def test_a_line_without_an_end_in_sight_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "MAX_LINE_BYTES", 200)
    write(path, " " * 201)
    with pytest.raises(TraceError, match="line 2: longer than 200 bytes"):
        list(read_events(path))


def test_another_kind_of_file_and_another_version_are_refused(path: Path) -> None:
    for text in (json.dumps(LINE), json.dumps({**HEADER, "version": 2})):
        path.write_text(text + "\n")
        with pytest.raises(TraceError, match="line 1: not the header of a recording of this release"):
            list(read_events(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the recording"):
        list(read_events(tmp_path))
