"""How many blocks of a prompt the store has, asked by the scheduler: for all ranks, within a deadline, and never an error.

While the store cannot be reached the answer is 0 at once: see Jobs.
"""

import time
from collections.abc import Sequence
from typing import Final

from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.identity import Shard

CONNECT_S: Final = 5.0
"""For an engine that begins, which takes longer than that."""


class Lookup:
    """Used by one thread."""

    def __init__(self, jobs: Jobs, shards: Sequence[Shard], *, deadline_s: float) -> None:
        """`shards`: those of all ranks; a block is there once each of them is."""
        self._jobs = jobs
        self._shards = shards
        self._deadline_s = deadline_s
        self.counters = Counters()

    def connect(self) -> None:
        """Ask once, so that no request waits for the connection: for CONNECT_S at the most, and whatever comes of it."""
        self._jobs.match_prefix([shard.key(b"") for shard in self._shards[:1]], deadline_s=CONNECT_S)

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on without a gap, can be read now; 0 if the store does not say so in time."""
        if not hashes:
            return 0
        begin_s = time.monotonic()
        count = len(hashes)
        for shard in self._shards:
            left_s = begin_s + self._deadline_s - time.monotonic()
            count = self._jobs.match_prefix(shard.keys(hashes[:count]), deadline_s=left_s) if count and left_s > 0 else 0
        self.counters.add(Counters(lookups=1, lookup_s=time.monotonic() - begin_s, hit_blocks=count, missed_blocks=len(hashes) - count))
        return count
