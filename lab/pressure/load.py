"""Users who ask, read the answer and ask again: the load of model.py. No server, and no clock: the time is told.

Each user has one request under way at most, so a server that is slower is asked less: the load is closed. What a user asks does not
depend on what became of earlier requests, so that every strategy is asked the same.
"""

import heapq
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument

MAX_USERS: Final = 10_000
MAX_TOKENS: Final = 1 << 30
MAX_DURATION_S: Final = 86_400.0
"""A day: the simulation takes a step for every token of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoad:
    """So many users, and what they ask. Raises InvalidArgument for a figure that cannot be."""

    users: int
    context_tokens: int
    """Of a prompt, in the mean."""
    output_tokens: int
    """Of an answer, in the mean."""
    spread: float = 0.25
    """Of both: they are drawn evenly from (1 - spread) to (1 + spread) times their mean."""
    think_s: float = 10.0
    """From an answer to the next request, in the mean of an exponential distribution."""
    duration_s: float = 600.0
    """How long users begin requests; those begun are served to their end."""

    def __post_init__(self) -> None:
        for name, limit in (("users", MAX_USERS), ("context_tokens", MAX_TOKENS), ("output_tokens", MAX_TOKENS)):
            if not 1 <= getattr(self, name) <= limit:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: it must be from 1 to {limit:,}")
        if not 0 <= self.spread < 1:
            raise InvalidArgument(f"spread is {self.spread:g}: it must be 0 or more and below 1")
        for name in ("think_s", "duration_s"):
            if not 0 < getattr(self, name) <= MAX_DURATION_S:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}: it must be above 0 and at most {MAX_DURATION_S:g} seconds")


class FinishReason(Enum):
    """Why a request is over."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """Before anything was computed for it."""
    EVICTED = "evicted"
    """In the middle of its answer."""


@dataclass(slots=True)
class Generation:
    """A request and what became of it. A prompt and g tokens of the answer have prompt_tokens + g - 1 tokens of cache: the latest
    token's keys and values come with the step that computes the next one."""

    number: int
    """In the order of arrival."""
    user: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    is_started: bool = False
    wait_s: float = 0.0
    """From arrival until its first prefill begins."""
    ttft_s: float = 0.0
    """From arrival until that prefill has given the first token."""
    ended_s: float = 0.0
    ending: FinishReason | None = None

    @property
    def most_cached_tokens(self) -> int:
        """Of cache, just before the last token of the answer."""
        return self.prompt_tokens + self.output_tokens - 1


class RequestSource(Protocol):
    """Where requests come from."""

    @property
    def asked(self) -> int:
        """How many came so far."""
        ...

    @property
    def next_s(self) -> float | None:
        """When the next request comes; None if there will be none unless somebody is answered."""
        ...

    def ask(self) -> Generation:
        """The next request. There must be one (`next_s`)."""
        ...

    def answered(self, user: int, *, now_s: float) -> None:
        """The user has the answer, or an error."""
        ...


class Users:
    """Askers who think between an answer and the next request."""

    def __init__(self, load: UserLoad, rng: Random) -> None:
        """Every user draws from a generator of its own, seeded from `rng`; each thinks before the first request."""
        self._load = load
        self._draws = [Random(rng.getrandbits(64)) for _ in range(load.users)]
        self._next: list[tuple[float, int]] = []
        """Heap of (when, user)."""
        self.asked = 0
        for user in range(load.users):
            self.answered(user, now_s=0.0)

    @property
    def next_s(self) -> float | None:
        return self._next[0][0] if self._next else None

    def ask(self) -> Generation:
        at_s, user = heapq.heappop(self._next)
        found = Generation(
            self.asked, user, at_s, self._tokens(user, self._load.context_tokens), self._tokens(user, self._load.output_tokens)
        )
        self.asked += 1
        return found

    def answered(self, user: int, *, now_s: float) -> None:
        """The user asks again after a while, if that is within the duration."""
        at_s = now_s + self._draws[user].expovariate(1 / self._load.think_s)
        if at_s < self._load.duration_s:
            heapq.heappush(self._next, (at_s, user))

    def _tokens(self, user: int, mean: int) -> int:
        spread = self._load.spread
        return max(1, round(mean * self._draws[user].uniform(1 - spread, 1 + spread)))
