"""Which of several masters owns the catalog, or a partition of it: their addresses, and rounds of asking them. Sans-I/O but for
`find_owner`.

One master owns the catalog and the others stand by. What a master answers to Hello says which it is: a Welcome of the owner, a Welcome that
names the owner, or a refusal while nobody owns it. Only the owner's own word counts: one that is named may have lost it meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, NoOwner, TooManyConnections, Unavailable
from kvstore.protocol.session_messages import SERVER_MASTER, Hello, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates

MAX_NAMED: Final = 16
"""Addresses known only because a master named them, the latest; and names that one round follows."""
LONGEST_PAUSE: Final = 8
"""Times the first pause between two rounds: an election takes as long as the former owner's lease, and should be noticed soon after."""
LOOKS: Final = 4
"""Rounds in the time of an owner's patience, once it has passed."""
PASSED_OVER: Final = 4
"""Times as long as a master was waited for in vain it is left out afterwards, where another one says who the owner is, or that none is."""


class _Silence(NamedTuple):
    """Of a master that did not answer: since when, how long it was waited for, and how often in a row."""

    since_ns: int
    waited_ns: int
    times: int


class Masters:
    """Addresses of masters, all for one partition: those given, and owners that masters named. Threads may share it: a race costs a
    question, no more."""

    def __init__(self, given: Sequence[Address], *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises InvalidArgument: there is none."""
        if not given:
            raise InvalidArgument("the address of at least one master is needed")
        self._given = tuple(dict.fromkeys(given))
        self._named: tuple[Address, ...] = ()
        self.owner = self._given[0]
        """The owner, as far as is known: set by who has heard it from the owner itself."""
        self.clock_ns = clock_ns
        self._silent: dict[Address, _Silence] = {}
        """Those that did not answer when they were asked last."""

    def in_order(self) -> list[Address]:
        """All of them, from the owner on, those last that did not answer: each would be waited for anew. Of these the one first that was
        asked longest ago, so that each has its turn where there is never time for all."""
        known = list(dict.fromkeys((*self._given, *self._named, self.owner)))
        at = known.index(self.owner)
        return sorted(known[at:] + known[:at], key=self._silent_since_ns)

    def _silent_since_ns(self, address: Address) -> int:
        known = self._silent.get(address)
        return -1 if known is None else known.since_ns

    def was_silent(self, address: Address, waited_ns: int) -> None:
        """It did not answer in that time."""
        self._silent[address] = _Silence(self.clock_ns(), waited_ns, self.silences(address) + 1)

    def has_answered(self, address: Address) -> None:
        """Something, or its host did."""
        self._silent.pop(address, None)

    def silences(self, address: Address) -> int:
        """How often in a row it has not answered."""
        known = self._silent.get(address)
        return 0 if known is None else known.times

    def may_pass_over(self, address: Address) -> bool:
        """Whether a round need not ask this one, for it did not answer a moment ago."""
        known = self._silent.get(address)
        return known is not None and self.clock_ns() - known.since_ns < PASSED_OVER * known.waited_ns

    @property
    def are_several(self) -> bool:
        return len(self._given) + len(self._named) > 1

    def learn(self, text: str) -> Address:
        """The address that a master named. Raises InvalidArgument: it is none."""
        address = parse_address(text)._replace(partition=self.owner.partition)
        if address not in self._given:
            self._named = (*(each for each in self._named if each != address), address)[-MAX_NAMED:]
        return address


class OwnerSearchRound:
    """Masters are asked in turn whether they own the catalog, each once at most. Whom one names is asked next."""

    def __init__(self, masters: Masters, *, besides: Address | None = None) -> None:
        """`besides` is not asked: the owner so far, say, which does not answer."""
        self._masters = masters
        self._waiting = deque(masters.in_order())
        self._asked = {besides}
        self._asked_ns = masters.clock_ns()
        self._named: set[Address] = set()
        self._failures: list[KVStoreError] = []
        self._is_told = False
        """A master has said that another one is the owner, or nobody."""

    def next(self) -> Address | None:
        """Whom to ask: `failed` or `is_owner` is told what came of it. None: all have been asked, but for those that did not answer a
        moment ago where others do and none of these names them: the next owner is found sooner if nobody else is waited for."""
        while self._waiting:
            address = self._waiting.popleft()
            if address in self._asked:
                continue
            self._asked.add(address)
            if address in self._named or not (self._is_told and self._masters.may_pass_over(address)):
                self._asked_ns = self._masters.clock_ns()
                return address
        return None

    def failed(self, address: Address, error: KVStoreError) -> None:
        """It does not answer, or refuses."""
        self._asked.add(address)
        if isinstance(error, DeadlineExceeded):
            self._masters.was_silent(address, self._masters.clock_ns() - self._asked_ns)
            error = Unavailable(f"{address} does not answer")
        else:
            self._masters.has_answered(address)
        self._is_told |= isinstance(error, NoOwner)
        self._failures.append(error)

    def is_owner(self, address: Address, welcome: Welcome) -> bool:
        """Whether the one that introduced itself so is the owner, which `masters` knows as such from then on."""
        if welcome.server != SERVER_MASTER:
            self.failed(address, Unavailable(f"{address} is {welcome.name!r}, which is no master"))
        elif welcome.owner:
            self.failed(address, Unavailable(f"{address} stands by for {welcome.owner}"))
            self._is_told = True
            self._follow(welcome.owner)
        else:
            self._masters.has_answered(address)
            self._masters.owner = address
            return True
        return False

    def _follow(self, name: str) -> None:
        try:
            named = self._masters.learn(name)
        except InvalidArgument:
            return
        if len(self._named) < MAX_NAMED:
            self._named.add(named)
            self._waiting.appendleft(named)

    def end(self) -> None:
        """What has failed is forgotten: errors refer to the calls that they came from, and so to this round."""
        self._failures.clear()

    def error(self) -> KVStoreError:
        """Of a round that has found no owner: Unavailable, NoOwner where a master says so, TooManyConnections where none has a place or a
        descriptor left, unless one has refused for another reason (Unauthorized, ProtocolError)."""
        refusals = [failure for failure in self._failures if not isinstance(failure, Unavailable)]
        if refusals:
            return refusals[0]
        is_awaited = any(isinstance(failure, NoOwner) for failure in self._failures)
        told = "; ".join(dict.fromkeys(map(str, self._failures))) or "there was no time to ask one"
        are_full = bool(self._failures) and all(isinstance(failure, TooManyConnections) for failure in self._failures)
        kind = NoOwner if is_awaited else TooManyConnections if are_full else Unavailable
        return kind(f"no master can be reached: {told}")


def is_awaited(masters: Masters, error: KVStoreError) -> bool:
    """Whether an owner may be found soon after a round that ended so: there are several masters, or the only one follows the catalog."""
    return isinstance(error, NoOwner) or (isinstance(error, Unavailable) and masters.are_several)


def pauses(first_s: float) -> Iterator[float]:
    """Seconds between one round and the next: they double up to LONGEST_PAUSE times the first."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE * first_s)


def looks(patience_s: float, *, is_doubted: bool = False) -> Iterator[float]:
    """Seconds that an owner which does not answer is waited for between one round among the others and the next: its patience before the
    first one, unless it was waited for already, then a part of it, for another one is about to be elected."""
    if not is_doubted:
        yield patience_s
    while True:
        yield patience_s / LOOKS


def find_owner(
    masters: Masters,
    hello: Hello,
    deadline: Deadline,
    *,
    attempt_s: float,
    max_attempt_s: float = 0.0,
    besides: Address | None = None,
    tls: "Certificates | None" = None,
) -> Channel:
    """One round: an introduced connection to the owner. One attempt takes `attempt_s` at most, and as much longer for each time in a row
    that this master has not answered, up to `max_attempt_s`. Who is not asked for want of time has not been silent.

    Raises Unavailable: none says that it is the owner; or what a master refuses with (Unauthorized, ProtocolError).
    """
    asking = OwnerSearchRound(masters, besides=besides)
    try:
        while deadline.up_to_s(attempt_s) and (address := asking.next()) is not None:
            patience_s = max(attempt_s, min((1 + masters.silences(address)) * attempt_s, max_attempt_s))
            try:
                channel = Channel.open(address, hello, deadline.part(patience_s), tls=tls)
            except KVStoreError as error:
                asking.failed(address, error)
                continue
            if asking.is_owner(address, channel.welcome):
                return channel
            channel.close()
        raise asking.error()
    finally:
        asking.end()


def await_owner(
    masters: Masters, hello: Hello, deadline: Deadline, *, attempt_s: float, pause_s: float, tls: "Certificates | None" = None
) -> Channel:
    """As `find_owner`, again and again until the deadline where there are several masters, or one that awaits an owner: `pause_s` is the
    first pause."""
    waits = pauses(pause_s)
    while True:
        try:
            return find_owner(masters, hello, deadline, attempt_s=attempt_s, tls=tls)
        except Unavailable as error:
            pause_s = next(waits)
            if not is_awaited(masters, error) or deadline.up_to_s(pause_s) < pause_s:
                raise
        time.sleep(pause_s)
