"""What an admission policy sees of both pools, kept as a simulation goes on. Bookkeeping; admission.py decides."""

from typing import Final

from kvstore.scheduler.admission import PoolLoad
from kvstore.scheduler.simulator.job import Job

NEWEST_SHARE: Final = 0.02
"""Weight of the sequence that ended last in the mean of how long they are decoded: about the last fifty count."""


class Pools:
    """Each job is taken, then decoded, then ended; or rejected in between."""

    def __init__(self, *, decode_instances: int) -> None:
        self._decode_instances = decode_instances
        self._prefill_ends_s: dict[int, float] = {}
        self._decode_begun_s: dict[int, float] = {}
        self._context_tokens = 0
        self._decode_s = 0.0

    def load(self, now_s: float) -> PoolLoad:
        """Of this moment."""
        decoded = len(self._decode_begun_s)
        return PoolLoad(
            now_s=now_s,
            decode_instances=self._decode_instances,
            decode_begun_s=list(self._decode_begun_s.values()),
            prefill_ends_s=sorted(self._prefill_ends_s.values()),
            decode_s=self._decode_s,
            context_tokens=self._context_tokens / decoded if decoded else 0.0,
        )

    def taken(self, job: Job, *, prefill_end_s: float) -> None:
        """Its first token is expected at that moment."""
        self._prefill_ends_s[job.number] = prefill_end_s

    def prefilled(self, job: Job) -> None:
        """Its prefill is over; nothing follows unless `decoded` does."""
        del self._prefill_ends_s[job.number]

    def decoded(self, job: Job, *, now_s: float) -> None:
        """From now on."""
        self._decode_begun_s[job.number] = now_s
        self._context_tokens += job.request.input_tokens

    def ended(self, job: Job, *, now_s: float) -> None:
        """Its last token came now."""
        lasted_s = now_s - self._decode_begun_s.pop(job.number)
        self._context_tokens -= job.request.input_tokens
        self._decode_s = self._decode_s + NEWEST_SHARE * (lasted_s - self._decode_s) if self._decode_s else lasted_s
