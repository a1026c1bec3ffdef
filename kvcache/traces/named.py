"""Traces by name on a command line: a file, or `generated:SEED:COUNT` for synthetic conversations.

**Synthetic conversations** have the statistics of the published conversation trace. Every prompt begins with the same
system prompt; a turn's prompt is the last one, its answer and a new message; blocks have 512 tokens and only full ones
are shared. Reproduced from the trace (12,031 requests in an hour): the share of turns that are continued, lengths of
prompts and answers, time between turns. Within a few per cent this also gives the share of blocks used once (0.76), the
best possible prefix hit ratio (0.366) and that of LRU. It models no single user.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl, measured.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

from kvstore.kvcache.traces import mooncake
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import InvalidArgument, TraceError

BLOCK_TOKENS: Final = 512
CONTINUED: Final = (0.31, 0.42, 0.51, 0.59)
"""Share of first, second, third and later turns that are followed by another one."""
CONVERSATIONS_PER_S: Final = 7373 / 3537
FIRST_PROMPT: Final = (8.54, 1.265)
"""Mean and standard deviation of the logarithm of a first prompt's tokens."""
PROMPT_TOKENS: Final = (891, 126_195)
"""Shortest and longest prompt of the trace."""
ANSWER: Final = (5.95, 0.45)
TERSE: Final = (2.5, 0.9)
"""ANSWER and TERSE: logarithms of tokens of an ordinary answer, and of one of a word or two."""
TERSE_SHARE: Final = 0.2
QUESTION: Final = (3.0, 1.0)
"""Logarithm of the tokens that the next message adds."""
DOCUMENT: Final = (7.6, 1.1)
"""Likewise for a message with a pasted document."""
DOCUMENT_SHARE: Final = 0.3
MIN_PAUSE_S: Final = 30.0
PAUSE: Final = (math.log(95), 1.4)
"""Logarithm of the seconds beyond MIN_PAUSE_S between a conversation's prompts."""


@dataclass(slots=True)
class _Conversation:
    turn: int
    input_tokens: int
    blocks: list[int] = field(default_factory=list)


def generate(*, seed: int) -> Iterator[TraceRequest]:
    """Yield requests in order of their timestamps, endlessly; the same ones for the same seed."""
    random = Random(seed)
    next_block = count(1)
    order = count()
    starts_s = random.expovariate(CONVERSATIONS_PER_S)
    waiting: list[tuple[float, int, _Conversation]] = []
    while True:
        if not waiting or starts_s < waiting[0][0]:
            now_s = starts_s
            starts_s += random.expovariate(CONVERSATIONS_PER_S)
            talk = _Conversation(1, _prompt_tokens(random.lognormvariate(*FIRST_PROMPT)))
        else:
            now_s, _, talk = heapq.heappop(waiting)
        _take_blocks(talk, next_block)
        output_tokens = _answer_tokens(random)
        yield TraceRequest(int(now_s * 1000), talk.input_tokens, output_tokens, tuple(talk.blocks))
        if random.random() < CONTINUED[min(talk.turn, len(CONTINUED)) - 1]:
            longer = _Conversation(talk.turn + 1, _prompt_tokens(talk.input_tokens + output_tokens + _message_tokens(random)))
            longer.blocks = talk.blocks[: talk.input_tokens // BLOCK_TOKENS]
            heapq.heappush(waiting, (now_s + MIN_PAUSE_S + random.lognormvariate(*PAUSE), next(order), longer))


def _take_blocks(talk: _Conversation, next_block: Iterator[int]) -> None:
    """Assign ids to the prompt's new blocks; block 0 of every prompt is the system prompt."""
    if not talk.blocks:
        talk.blocks.append(0)
    while len(talk.blocks) * BLOCK_TOKENS < talk.input_tokens:
        talk.blocks.append(next(next_block))


def _prompt_tokens(tokens: float) -> int:
    shortest, longest = PROMPT_TOKENS
    return min(max(int(tokens), shortest), longest)


def _answer_tokens(random: Random) -> int:
    return max(1, int(random.lognormvariate(*(TERSE if random.random() < TERSE_SHARE else ANSWER))))


def _message_tokens(random: Random) -> int:
    return int(random.lognormvariate(*(DOCUMENT if random.random() < DOCUMENT_SHARE else QUESTION)))


GENERATED: Final = "generated:"
FORM: Final = "generated:SEED:COUNT"


def read_requests(
    name: str, *, limit: int | None = None, read_file: Callable[[str], Iterator[TraceRequest]] = mooncake.read_trace
) -> Iterator[TraceRequest]:
    """Return the first `limit` requests of the trace `name`, or all.

    `read_file` reads a trace file. Raises InvalidArgument for a malformed `generated:`, TraceError for a missing file;
    iteration raises what `read_file` raises.
    """
    if name.startswith(GENERATED):
        seed, count = _seed_and_count(name)
        return itertools.islice(generate(seed=seed), min(count, limit or count))
    _require_file(name)
    return itertools.islice(read_file(name), limit)


def count_requests(name: str, *, limit: int | None = None) -> int:
    """Return how many requests `read_requests(name, limit=limit)` yields, by counting lines. Raises as
    `read_requests`."""
    if name.startswith(GENERATED):
        count = _seed_and_count(name)[1]
    else:
        _require_file(name)
        count = mooncake.count_requests(name)
    return min(count, limit or count)


def _require_file(name: str) -> None:
    if not Path(name).exists():
        raise TraceError(f"cannot read the trace {name}: No such file or directory; use {FORM} for a generated trace")


def _seed_and_count(name: str) -> tuple[int, int]:
    seed, _, count = name.removeprefix(GENERATED).partition(":")
    if not seed.isdecimal() or not count.isdecimal() or not int(count):
        raise InvalidArgument(f"{name!r} is not of the form {FORM}, with two whole numbers and COUNT at least 1")
    return int(seed), int(count)
