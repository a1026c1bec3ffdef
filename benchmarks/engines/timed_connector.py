"""kvstore's connector in vLLM's scheduler, with a stopwatch around what the scheduler waits for."""

import time
from typing import Any

from kvstore.client.jobs.job import JobKind
from kvstore.engines.vllm.connector import KVStoreConnector


class TimedConnector(KVStoreConnector):
    """Times lookups on the scheduler's thread."""

    asked = 0
    """Calls of vLLM for the tokens of a waiting request."""
    asked_s = 0.0

    def get_num_new_matched_tokens(self, *arguments: Any) -> tuple[int | None, bool]:
        begin_s = time.perf_counter()
        answer = super().get_num_new_matched_tokens(*arguments)
        self.asked += 1
        self.asked_s += time.perf_counter() - begin_s
        return answer

    def timed(self) -> dict[str, float]:
        """Totals since the engine's start: calls, their seconds, and messages to the store."""
        kinds = self._jobs.stats().kinds if self._jobs is not None else {}
        messages = sum(kinds[kind].jobs for kind in (JobKind.LOOKUP, JobKind.PREFIX) if kind in kinds)
        return {"calls": self.asked, "seconds": self.asked_s, "messages": messages}
