"""Closed-loop load of the pressure model: users who send a request, wait for the response, think, and send the next. Time is passed in.

Each user has at most one request under way, so a slower server gets fewer requests. The sizes of a user's requests do not depend on the
outcomes of earlier ones, so every strategy gets the same requests.
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
"""A day; the simulation takes a step per token of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoad:
    """Parameters of the users. Raises InvalidArgument for values out of range."""

    users: int
    context_tokens: int
    """Mean length of a prompt."""
    output_tokens: int
    """Mean length of a response."""
    spread: float = 0.25
    """Both lengths are uniform in [1 - spread, 1 + spread] times their mean."""
    think_s: float = 10.0
    """Mean of the exponential time from a response to the next request."""
    duration_s: float = 600.0
    """Time in which users send requests; those sent are served to their end."""

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
    """End of a request."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """Before its prefill."""
    EVICTED = "evicted"
    """In the middle of its response."""


@dataclass(slots=True)
class Generation:
    """A request and its outcome.

    With g output tokens it has prompt_tokens + g - 1 tokens of cache: keys and values of the latest token are computed by the next step.
    """

    number: int
    """Order of arrival."""
    user: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    is_started: bool = False
    wait_s: float = 0.0
    """From arrival to the start of the first prefill."""
    ttft_s: float = 0.0
    """From arrival to the first token."""
    ended_s: float = 0.0
    ending: FinishReason | None = None

    @property
    def most_cached_tokens(self) -> int:
        """Largest cache, just before the last output token."""
        return self.prompt_tokens + self.output_tokens - 1


class RequestSource(Protocol):
    """Interface of the load, as the server sees it."""

    @property
    def sent(self) -> int:
        """Number of requests so far."""
        ...

    @property
    def next_s(self) -> float | None:
        """Arrival of the next request; None if all users wait for responses."""
        ...

    def take(self) -> Generation:
        """Return the next request. `next_s` must not be None."""
        ...

    def finish(self, user: int, *, now_s: float) -> None:
        """Deliver the response, or an error, to the user."""
        ...


class Users:
    """Users of a UserLoad, who think between a response and the next request."""

    def __init__(self, load: UserLoad, rng: Random) -> None:
        """Each user has a random generator of its own, seeded from `rng`, and thinks before the first request."""
        self._load = load
        self._draws = [Random(rng.getrandbits(64)) for _ in range(load.users)]
        self._next: list[tuple[float, int]] = []
        """Heap of (time, user)."""
        self.sent = 0
        for user in range(load.users):
            self.finish(user, now_s=0.0)

    @property
    def next_s(self) -> float | None:
        return self._next[0][0] if self._next else None

    def take(self) -> Generation:
        at_s, user = heapq.heappop(self._next)
        found = Generation(
            self.sent, user, at_s, self._tokens(user, self._load.context_tokens), self._tokens(user, self._load.output_tokens)
        )
        self.sent += 1
        return found

    def finish(self, user: int, *, now_s: float) -> None:
        """Schedule the user's next request, if it is within the duration."""
        at_s = now_s + self._draws[user].expovariate(1 / self._load.think_s)
        if at_s < self._load.duration_s:
            heapq.heappush(self._next, (at_s, user))

    def _tokens(self, user: int, mean: int) -> int:
        spread = self._load.spread
        return max(1, round(mean * self._draws[user].uniform(1 - spread, 1 + spread)))
