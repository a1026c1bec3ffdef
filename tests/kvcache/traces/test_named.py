"""Promises of named.py."""

import itertools
import json
from pathlib import Path

import pytest

from kvstore.kvcache.traces.conversations import generate
from kvstore.kvcache.traces.kv_events import read_prompts
from kvstore.kvcache.traces.named import count_requests, read_requests
from kvstore.protocol.errors import InvalidArgument, TraceError


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": number, "input_length": 512, "output_length": 1, "hash_ids": [number]} for number in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_generated_requests_follow_from_the_seed() -> None:
    assert list(read_requests("generated:3:20")) == list(itertools.islice(generate(seed=3), 20))


def test_limit_takes_the_first_requests(trace: str) -> None:
    for name in ("generated:3:3", trace):
        every = list(read_requests(name))
        assert len(every) == count_requests(name) == 3
        assert list(read_requests(name, limit=2)) == every[:2]
        assert list(read_requests(name, limit=9)) == every
        assert (count_requests(name, limit=2), count_requests(name, limit=9)) == (2, 3)


def test_a_file_is_read_by_the_given_reader(trace: str) -> None:
    assert list(read_requests(trace, read_file=read_prompts)) == list(read_requests(trace))


def test_a_missing_file_names_the_generated_form(tmp_path: Path) -> None:
    message = r"cannot read the trace .*/TRACE: No such file or directory; generated:SEED:COUNT in its place"
    with pytest.raises(TraceError, match=message):
        read_requests(str(tmp_path / "TRACE"))
    with pytest.raises(TraceError, match=message):
        count_requests(str(tmp_path / "TRACE"))


@pytest.mark.parametrize("name", ["generated:", "generated:1", "generated:1:0", "generated:x:5", "generated:1:-5", "generated::5"])
def test_seed_and_count_are_whole_numbers(name: str) -> None:
    for call in (read_requests, count_requests):
        with pytest.raises(InvalidArgument, match="is not of the form generated:SEED:COUNT"):
            call(name)
