"""How many tokens of a prompt the store has, asked by the scheduler: for all ranks and groups of layers, within a deadline, never an error.

While the store cannot be reached the answer is 0 at once: see Jobs.
"""

import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.client.jobs.jobs import Jobs
from kvstore.client.tensors.groups import Present, longest
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.groups import LayerGroup
from kvstore.engines.vllm.identity import Shard

CONNECT_S: Final = 5.0
"""For an engine that begins, which takes longer than that."""


class Lookup:
    """Used by one thread."""

    def __init__(self, jobs: Jobs, groups: Sequence[LayerGroup], shards: Sequence[Sequence[Shard]], *, deadline_s: float) -> None:
        """`shards`: of each group those of all ranks; a block is there once each of them is."""
        self._jobs = jobs
        self._groups = groups
        self._shards = shards
        self._step_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._deadline_s = deadline_s
        self.counters = Counters()

    def connect(self) -> None:
        """Ask once, so that no request waits for the connection: for CONNECT_S at the most, and whatever comes of it."""
        self._jobs.match_prefix([shard.key(b"") for shard in self._shards[0][:1]], deadline_s=CONNECT_S)

    def tokens(self, start_tokens: int, hashes: Sequence[Sequence[bytes]]) -> int:
        """How many tokens after the first `start_tokens` can be read now; 0 if the store does not say so in time.

        A multiple of every group's block. `hashes`: of each group those of the blocks that follow `start_tokens`, of which, and of what is
        before, the engine has all that it needs.
        """
        wanted = min(len(of_group) * group.block_tokens for group, of_group in zip(self._groups, hashes, strict=True))
        if not wanted:
            return 0
        begin_s = time.monotonic()
        found = self._found(start_tokens, wanted, hashes, begin_s + self._deadline_s)
        blocks, missed = found // self._step_tokens, (wanted - found) // self._step_tokens
        self.counters.add(Counters(lookups=1, lookup_s=time.monotonic() - begin_s, hit_blocks=blocks, missed_blocks=missed))
        return found

    def _found(self, start_tokens: int, wanted: int, hashes: Sequence[Sequence[bytes]], until_s: float) -> int:
        """First those groups that need all blocks: the others need be asked of no more tokens than these have."""
        found = wanted
        for group, of_group, shards in zip(self._groups, hashes, self._shards, strict=True):
            for shard in shards if not group.window_tokens else ():
                left_s = until_s - time.monotonic()
                keys = shard.keys(of_group[: found // group.block_tokens])
                blocks = self._jobs.match_prefix(keys, deadline_s=left_s, budget_s=self._deadline_s) if keys and left_s > 0 else 0
                found = blocks * group.block_tokens
        found -= found % self._step_tokens
        windows = [place for place, group in enumerate(self._groups) if group.window_tokens]
        if windows and found:
            present = self._present(start_tokens, found, windows, hashes, until_s)
            found = longest([self._groups[place] for place in windows], present, limit_tokens=start_tokens + found) - start_tokens
        return max(0, found)

    def _present(
        self, start_tokens: int, tokens: int, windows: Sequence[int], hashes: Sequence[Sequence[bytes]], until_s: float
    ) -> list[Present]:
        """Of each of the groups `windows` which blocks of the first `start_tokens + tokens` are there, by one question."""
        counts = [tokens // self._groups[place].block_tokens for place in windows]
        keys = [shard.keys(hashes[place][:count]) for place, count in zip(windows, counts, strict=True) for shard in self._shards[place]]
        left_s = until_s - time.monotonic()
        asked = [key for of_shard in keys for key in of_shard]
        found = self._jobs.exists(asked, deadline_s=left_s, budget_s=self._deadline_s) if left_s > 0 else [False] * len(asked)
        answers = np.array(found, np.bool_)
        present = []
        for place, count in zip(windows, counts, strict=True):
            own = np.ones(start_tokens // self._groups[place].block_tokens, np.bool_)
            of_group, answers = np.split(answers, [len(self._shards[place]) * count])
            present.append(np.concatenate([own, of_group.reshape(-1, count).all(axis=0)]))
        return present
