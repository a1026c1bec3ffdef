"""Retention hints in a replay: what a policy gains from callers that know when their blocks are read again.

Hints are derived from the trace: after each prompt of a hinted session, each of its blocks is expected at the time of its
next access, or has priority 0 if it has none. Wrong hints name random times, and priority 0 at random.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.replay import CacheReplay
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import DEFAULT_PRIORITY

SHARED_BY: Final = 4
"""A block that this many different blocks follow belongs to no session."""
SOONEST_S: Final = 0.001
WRONG_TIMES_S: Final = (1.0, 3600.0)
"""Range of the times that wrong hints name, uniform in their logarithm."""


def sessions(requests: Sequence[TraceRequest]) -> list[int]:
    """Return a session number for each request: that of the last block that it shares with an earlier one, or a new one.

    A block that ends a prefix shared by many does not join sessions.
    """
    session_of: dict[int, int] = {}
    followers: defaultdict[int, set[int]] = defaultdict(set)
    found = []
    for number, request in enumerate(requests):
        blocks = request.hash_ids
        for block, following in pairwise(blocks):
            if len(followers[block]) < SHARED_BY:
                followers[block].add(following)
        known = next((block for block in reversed(blocks) if block in session_of), None)
        session = number if known is None or len(followers[known]) >= SHARED_BY else session_of[known]
        found.append(session)
        for block in blocks:
            session_of.setdefault(block, session)
    return found


def next_reads_s(requests: Sequence[TraceRequest]) -> Iterator[dict[int, float]]:
    """Yield for each request, last one first, the time of the next request that has each block, for blocks that have one."""
    next_s: dict[int, float] = {}
    for request in reversed(requests):
        yield {block: next_s[block] for block in request.hash_ids if block in next_s}
        next_s.update(dict.fromkeys(request.hash_ids, request.timestamp_ms / 1000))


class HintedReplay(CacheReplay):
    """Replay in which `share` of the sessions give hints after each prompt, of which `accuracy` are true; both in [0, 1]."""

    def __init__(
        self, policy: str, capacity_blocks: int, requests: Sequence[TraceRequest], *, share: float, accuracy: float, seed: int = 0
    ) -> None:
        """Raises InvalidArgument for a share or an accuracy out of range."""
        check_share("share", share)
        check_share("accuracy", accuracy)
        super().__init__(policy, capacity_blocks)
        self._random = Random(seed)
        self._accuracy = accuracy
        self._next_reads_s = list(next_reads_s(requests))
        """Of the requests to come, the next one last."""
        is_hinted: defaultdict[int, bool] = defaultdict(lambda: self._random.random() < share)
        self._is_hinted = [is_hinted[session] for session in sessions(requests)][::-1]

    def request(self, request: TraceRequest) -> int:
        lead = super().request(request)
        next_s = self._next_reads_s.pop()
        if self._is_hinted.pop():
            if self._random.random() >= self._accuracy:
                next_s = self._wrong_reads_s(request)
            self._hint(request, next_s)
        return lead

    def _wrong_reads_s(self, request: TraceRequest) -> dict[int, float]:
        """Random times for all blocks of a prompt, or none."""
        if self._random.random() < 0.5:
            return {}
        soonest_s, latest_s = WRONG_TIMES_S
        after_s = soonest_s * (latest_s / soonest_s) ** self._random.random()
        return dict.fromkeys(request.hash_ids, self._now_s + after_s)

    def _hint(self, request: TraceRequest, next_s: dict[int, float]) -> None:
        for block in request.hash_ids:
            if block in next_s:
                self._policy.set_priority(block, DEFAULT_PRIORITY)
                self._policy.expect_reuse(block, max(next_s[block] - self._now_s, SOONEST_S))
            else:
                self._policy.set_priority(block, 0)


def check_share(name: str, value: float) -> None:
    """Raise InvalidArgument unless the value is in [0, 1]."""
    if not 0 <= value <= 1:
        raise InvalidArgument(f"the {name} of hints is {value:g}: it must be from 0 to 1")
