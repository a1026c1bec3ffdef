"""Lookups of the scheduler: how many tokens of a prompt the store has, for all ranks and groups of layers. Never raises.

One message asks for all waiting requests that are due (waiting_requests.py), within a deadline. While the store cannot be reached the
answer is what this host's nodes have in shared memory, at once: see Jobs.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import numpy as np

from kvstore.client.holds import Hold, new_hold
from kvstore.client.jobs.breaker import State
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.tensors.groups import Present
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.groups import LayerGroup
from kvstore.engines.vllm.hits import HitCounter
from kvstore.engines.vllm.holds import RequestHolds
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import EngineRequest
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.waiting_requests import Found, LookupPlan, Question, WaitingRequests

CONNECT_S: Final = 5.0
"""For an engine that starts, which takes longer than that."""
MAX_BATCH_KEYS: Final = 8192
"""Keys of one lookup: about 4 ms of the scheduler's thread. Further waiting requests are left to a later one."""


class Lookup:
    """Used by the scheduler's thread, which waits `lookup_deadline_s` at most for a message."""

    def __init__(
        self, jobs: Jobs, groups: Sequence[LayerGroup], shards: Sequence[Sequence[Shard]], plan: LookupPlan, settings: VllmSettings
    ) -> None:
        """`shards` has, of each group, those of all ranks: a block is present once each of them is."""
        self._jobs = jobs
        self._shards = shards
        self._deadline_s = settings.lookup_deadline_s
        self._hold_s = settings.hold_s
        self._holds = RequestHolds()
        batch_blocks = MAX_BATCH_KEYS // max(map(len, shards))
        self.waiting = WaitingRequests(groups, plan, interval_s=settings.lookup_interval_s, batch_blocks=batch_blocks)
        self.hits = HitCounter(groups[0].block_tokens)
        self._counters = Counters()
        self._loading: set[str] = set()

    def connect(self) -> None:
        """Ask once, so that no request waits for the connection: for CONNECT_S at the most. Errors are ignored."""
        self._jobs.exists([shard.key(b"") for shard in self._shards[0][:1]], deadline_s=CONNECT_S)

    def find(self, request: EngineRequest, computed_tokens: int, now_s: float) -> Found:
        """Return how many tokens after the first `computed_tokens` can be loaded; none if the store does not answer in time.

        A multiple of every group's block. A result younger than `lookup_interval_s` is returned without asking. `now_s` is of
        time.monotonic.
        """
        if questions := self.waiting.questions(request, computed_tokens, now_s):
            begin_s = time.monotonic()
            hold = new_hold(self._hold_s) if self._hold_s else None
            self.waiting.answered(questions, self._ask(questions, hold), now_s)
            if hold is not None:
                self._release(self._holds.take(hold, [question.request_id for question in questions]))
            self._counters.add(Counters(lookups=1, lookup_s=time.monotonic() - begin_s))
        return self.waiting.found(request, computed_tokens)

    def admitted(self, request_id: str, table: Sequence[int], external_tokens: int) -> None:
        """vLLM gave the request the blocks `table`, of the first group, and loads `external_tokens`: see HitCounter."""
        self.hits.admitted(request_id, self.waiting.remove(request_id), table, external_tokens)
        if external_tokens:
            self._loading.add(request_id)
        elif request_id not in self._loading:
            self._release(self._holds.end([request_id]))

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests are over."""
        requests = list(request_ids)
        self._loading.difference_update(requests)
        self.hits.loaded(requests)
        self._release(self._holds.end(requests))

    def stepped(self) -> None:
        """The step is over in which loads began that the engine waits for."""
        self.loaded(list(self._loading))

    def ended(self, request_id: str) -> None:
        """The request is over, or was aborted."""
        self.waiting.remove(request_id)
        self.hits.ended(request_id)
        self._loading.discard(request_id)
        self._release(self._holds.end([request_id]))

    def take_counters(self) -> Counters:
        """Return what was counted since the last call."""
        counters = self._counters.take()
        counters.add(self.hits.counters.take())
        return counters

    @property
    def is_reachable(self) -> bool:
        """Whether the last message to the store was answered."""
        return self._jobs.stats().reads.state is State.CLOSED

    def _release(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            self._jobs.release(hold)

    def _ask(self, questions: Sequence[Question], hold: Hold | None) -> list[list[Present]]:
        """Of each question and group which blocks all ranks have, by one message. They stay in the name of `hold`."""
        keys = [
            shard.of(question.variant).keys(hashes)
            for question in questions
            for hashes, of_group in zip(question.hashes, self._shards, strict=True)
            for shard in of_group
        ]
        found = self._jobs.exists(list(chain.from_iterable(keys)), hold=hold, deadline_s=self._deadline_s)
        flags = np.array(found, np.bool_)
        answers: list[list[Present]] = []
        for question in questions:
            present: list[Present] = []
            for hashes, of_group in zip(question.hashes, self._shards, strict=True):
                of_ranks, flags = np.split(flags, [len(of_group) * len(hashes)])
                present.append(np.all(of_ranks.reshape(-1, len(hashes)), axis=0))
            answers.append(present)
        return answers
