"""One request on its way through a simulated cluster: where it went and when. A record; the servers write it, the report reads it."""

from dataclasses import dataclass

from kvstore.scheduler.decision import Decision, Rejection
from kvstore.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Job:
    """Stages add up: arrival_s + schedule_s + queue_s + fetch_s + load_s + prefill_s = first_token_s, and + stream_s + decode_s =
    finish_s."""

    number: int
    request: Request
    arrival_s: float
    output_tokens: int
    """As they turn out: at least 1."""
    decision: Decision | None = None
    rejection: Rejection | None = None
    queued_s: float = 0.0
    """The moment it was given to its instance."""
    ready_s: float = 0.0
    """The moment the blocks fetched for it are there."""
    expected_prefill_s: float = 0.0
    """By the scheduler's estimate."""
    prefix_blocks: int = 0
    """That were there when its prefill began."""
    prefix_tokens: int = 0
    schedule_s: float = 0.0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    """Waiting for blocks of another instance as the first of its queue."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    stream_s: float = 0.0
    """From the first token to the KV cache being where it is decoded."""
    decode_s: float = 0.0
    first_token_s: float = 0.0
    """As a moment, not a duration. 0 before there is one."""
    finish_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tokens_s(self) -> float:
        """Mean time between its tokens; 0 for a single one."""
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def cache_tokens(self) -> int:
        """KV cache that it needs to the end."""
        return self.request.input_tokens + self.output_tokens

    def begin_prefill(self, *, head_s: float, now_s: float) -> None:
        """It is taken off its queue at `now_s`, whose first it has been since `head_s`, or since it came."""
        self.fetch_s = max(0.0, self.ready_s - max(head_s, self.queued_s))
        self.queue_s = now_s - self.queued_s - self.fetch_s
