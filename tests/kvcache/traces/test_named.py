"""Promises of named.py, of conversations against the figures published for the trace that they imitate."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import BLOCK_TOKENS, PROMPT_TOKENS, count_requests, generate, read_requests
from kvstore.protocol.errors import InvalidArgument, TraceError


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": number, "input_length": 512, "output_length": 1, "hash_ids": [number]} for number in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_limit_takes_the_first_requests(trace: str) -> None:
    for name in ("generated:3:3", trace):
        every = list(read_requests(name))
        assert len(every) == count_requests(name) == 3
        assert list(read_requests(name, limit=2)) == every[:2]
        assert list(read_requests(name, limit=9)) == every
        assert (count_requests(name, limit=2), count_requests(name, limit=9)) == (2, 3)


def test_a_missing_file_names_the_generated_form(tmp_path: Path) -> None:
    message = r"cannot read the trace .*/TRACE: No such file or directory; use generated:SEED:COUNT"
    with pytest.raises(TraceError, match=message):
        read_requests(str(tmp_path / "TRACE"))
    with pytest.raises(TraceError, match=message):
        count_requests(str(tmp_path / "TRACE"))


@pytest.mark.parametrize("name", ["generated:", "generated:1", "generated:1:0", "generated:x:5", "generated:1:-5", "generated::5"])
def test_seed_and_count_are_whole_numbers(name: str) -> None:
    for call in (read_requests, count_requests):
        with pytest.raises(InvalidArgument, match="is not of the form generated:SEED:COUNT"):
            call(name)


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    """As many as the published trace has."""
    return list(itertools.islice(generate(seed=0), 12_031))


def parents(requests: Sequence[TraceRequest]) -> list[int | None]:
    """The request that each one continues, found by its longest known prefix beyond the system prompt."""
    owner: dict[int, int] = {}
    found: list[int | None] = []
    for index, request in enumerate(requests):
        shared = list(itertools.takewhile(owner.__contains__, request.hash_ids))
        found.append(owner[shared[-1]] if len(shared) > 1 else None)
        owner.update(dict.fromkeys(request.hash_ids, index))
    return found


def test_same_seed_gives_the_same_requests(requests: list[TraceRequest]) -> None:
    assert list(itertools.islice(generate(seed=0), 100)) == requests[:100]
    assert list(itertools.islice(generate(seed=1), 100)) != requests[:100]


def test_requests_come_in_the_order_of_time_over_about_an_hour(requests: list[TraceRequest]) -> None:
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(3_537_000, rel=0.1)


def test_generated_prompts_begin_with_the_system_prompt(requests: list[TraceRequest]) -> None:
    for request in requests:
        assert request.hash_ids[0] == 0
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert PROMPT_TOKENS[0] <= request.input_length <= PROMPT_TOKENS[1]
        assert request.output_length >= 1


def test_mean_lengths_are_the_published_ones(requests: list[TraceRequest]) -> None:
    assert mean(request.input_length for request in requests) == pytest.approx(12_035, rel=0.05)
    assert mean(request.output_length for request in requests) == pytest.approx(343, rel=0.05)


def test_turns_are_continued_as_often_as_published(requests: list[TraceRequest]) -> None:
    turns: list[int] = []
    followed: Counter[int] = Counter()
    for parent in parents(requests):
        turns.append(0 if parent is None else turns[parent] + 1)
        followed[-1 if parent is None else parent] += 1
    for turn, share in enumerate((0.31, 0.42, 0.51, 0.59)):
        # If a prompt's only full block is the system prompt's, its next turn is unknown.
        tellable = [index for index, at in enumerate(turns) if at == turn and requests[index].input_length >= 2 * BLOCK_TOKENS]
        assert sum(index in followed for index in tellable) / len(tellable) == pytest.approx(share, abs=0.05)


def test_reuse_of_blocks_is_about_the_published_one(requests: list[TraceRequest]) -> None:
    uses = Counter(block for request in requests for block in request.hash_ids)
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
    assert Counter(uses.values())[1] / len(uses) == pytest.approx(0.758, abs=0.06)
    assert hits / uses.total() == pytest.approx(0.366, abs=0.02)


def test_time_between_uses_of_a_block_is_about_the_published_one(requests: list[TraceRequest]) -> None:
    last: dict[int, float] = {}
    gaps_s = []
    for request in requests:
        gaps_s += [(request.timestamp_ms - last[block]) / 1000 for block in request.hash_ids[1:] if block in last]
        last.update(dict.fromkeys(request.hash_ids, request.timestamp_ms))
    gaps_s.sort()
    assert gaps_s[len(gaps_s) // 2] == pytest.approx(114, rel=0.15)
    assert gaps_s[len(gaps_s) * 9 // 10] == pytest.approx(519, rel=0.15)
