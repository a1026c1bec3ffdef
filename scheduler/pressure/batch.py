"""The requests in decode and the tokens of cache they hold. It knows no room and no strategy: server.py does."""

from bisect import insort
from dataclasses import dataclass

from kvstore.scheduler.pressure.load import Generation


@dataclass(slots=True, eq=False)
class Member:
    """A request that has been started: in a batch, or displaced from one."""

    request: Generation
    tokens: int = 0
    """Of its answer, when it was last taken into a batch or out of it."""
    joined_step: int | None = None
    """Of the batch it is in. Each step since has given it one more token."""
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
    """Members by arrival. A step costs the same whatever their number; joining and leaving cost one look at each."""

    def __init__(self) -> None:
        self.cached_tokens = 0
        """Of all members together."""
        self.full_tokens = 0
        """What they will have cached together before their last tokens."""
        self._members: list[Member] = []
        self._steps = 0
        self._next_end = 0
        """The step after which a member is done, if there is a member."""

    def __len__(self) -> int:
        return len(self._members)

    def join(self, member: Member) -> None:
        """It has at least one token of its answer still to come."""
        member.joined_step = self._steps
        insort(self._members, member, key=lambda each: each.number)
        self.cached_tokens += member.cached_tokens
        self.full_tokens += member.request.most_cached_tokens
        self._find_next_end()

    def leave_youngest(self) -> Member:
        """The one that came last, out of the batch. There must be one."""
        return self._leave(self._members[-1])

    def step(self) -> list[Member]:
        """Each has a token more; those that have all of theirs, out of the batch."""
        self._steps += 1
        self.cached_tokens += len(self._members)
        if self._steps < self._next_end:
            return []
        return [self._leave(member) for member in list(self._members) if self._end(member) == self._steps]

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the members. For tests."""
        assert self.cached_tokens == sum(each.cached_tokens + self._steps - (each.joined_step or 0) for each in self._members)
        assert self.full_tokens == sum(each.request.most_cached_tokens for each in self._members)
        assert self._members == sorted(self._members, key=lambda each: each.number)
        assert all(self._end(each) > self._steps for each in self._members)

    def _leave(self, member: Member) -> Member:
        assert member.joined_step is not None
        self._members.remove(member)
        member.tokens += self._steps - member.joined_step
        member.joined_step = None
        self.cached_tokens -= member.cached_tokens
        self.full_tokens -= member.request.most_cached_tokens
        self._find_next_end()
        return member

    def _find_next_end(self) -> None:
        self._next_end = min(map(self._end, self._members), default=0)

    @staticmethod
    def _end(member: Member) -> int:
        """The step after which it is done."""
        assert member.joined_step is not None
        return member.joined_step + member.request.output_tokens - member.tokens
