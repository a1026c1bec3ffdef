"""The requests in decode and the tokens of cache they hold. It knows no room and no strategy: server.py does."""

from bisect import insort
from dataclasses import dataclass

from kvstore.scheduler.batching import RunningBatch
from kvstore.scheduler.pressure.load import Generation


@dataclass(slots=True, eq=False)
class Member:
    """A request that has been started: in a batch, or displaced from one."""

    request: Generation
    tokens: int = 0
    """Of its answer, when it was last taken into a batch or out of it."""
    held_in: int | None = None
    """Number of the lower tier that has its cache; None: no cache, or in a batch."""
    held_bytes: int = 0

    @property
    def cached_tokens(self) -> int:
        """Of its cache when it was last taken into a batch or out of it."""
        return self.request.prompt_tokens + self.tokens - 1

    @property
    def number(self) -> int:
        return self.request.number


class Batch:
    """Members by arrival, what they have cached, and what they will have. A step costs the same whatever their number; joining and leaving
    cost one look at each."""

    def __init__(self) -> None:
        self.full_tokens = 0
        """What they will have cached together before their last tokens."""
        self._running: RunningBatch[Member] = RunningBatch()
        self._members: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def cached_tokens(self) -> int:
        """Of all members together."""
        return self._running.context_tokens

    def join(self, member: Member) -> None:
        """It has at least one token of its answer still to come."""
        self._running.join(member, context_tokens=member.cached_tokens, steps=member.request.output_tokens - member.tokens)
        insort(self._members, member, key=_number)
        self.full_tokens += member.request.most_cached_tokens

    def leave_youngest(self) -> Member:
        """The one that came last, out of the batch. There must be one."""
        member = self._members[-1]
        self._left(member, lacking=self._running.leave(member))
        return member

    def step(self) -> list[Member]:
        """Each has a token more; those that have all of theirs, out of the batch."""
        ended = sorted(self._running.advance(), key=_number)
        for member in ended:
            self._left(member, lacking=0)
        return ended

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the members. For tests."""
        self._running.check_integrity()
        assert set(self._members) == set(self._running.members())
        assert self.full_tokens == sum(each.request.most_cached_tokens for each in self._members)
        assert self._members == sorted(self._members, key=_number)

    def _left(self, member: Member, *, lacking: int) -> None:
        self._members.remove(member)
        member.tokens = member.request.output_tokens - lacking
        self.full_tokens -= member.request.most_cached_tokens


def _number(member: Member) -> int:
    return member.number
