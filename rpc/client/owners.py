"""Search for the master that owns the catalog, or a partition: addresses and search rounds.

Sans-I/O but for `find_owner`.

One master is the owner and the others follow. A master answers Hello with the owner's Welcome, a follower's Welcome
that gives the owner's address, or NoOwner. Only the owner's own Welcome counts: a follower's information may be stale.
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
"""Latest addresses known only from followers, and the most that one round follows."""
MAX_PAUSE_FACTOR: Final = 8
"""Longest pause between rounds, in first pauses: an election takes as long as the former owner's lease."""
PROBES: Final = 4
"""Rounds within one patience, after the owner has been silent for a patience."""
SKIP_FACTOR: Final = 4
"""A silent master is skipped for this many times the wait in vain, if another one has reported the owner or that there
is none."""


class _Silence(NamedTuple):
    """Timeouts of a master: time of the last, duration of its wait, number in a row."""

    since_ns: int
    waited_ns: int
    times: int


class Masters:
    """Addresses of masters for one partition: configured ones, and owners reported by followers.

    Threads may share it: a race costs an extra request.
    """

    def __init__(self, given: Sequence[Address], *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises InvalidArgument: `given` is empty."""
        if not given:
            raise InvalidArgument("the address of at least one master is needed")
        self._given = tuple(dict.fromkeys(given))
        self._named: tuple[Address, ...] = ()
        self.owner = self._given[0]
        """The last known owner, confirmed by its own Welcome."""
        self.clock_ns = clock_ns
        self._silent: dict[Address, _Silence] = {}
        """Masters whose last request timed out."""

    def in_order(self) -> list[Address]:
        """Return all addresses, the owner first; silent ones last, by time of their timeout, so that each is tried
        eventually.
        """
        known = list(dict.fromkeys((*self._given, *self._named, self.owner)))
        at = known.index(self.owner)
        return sorted(known[at:] + known[:at], key=self._silent_since_ns)

    def _silent_since_ns(self, address: Address) -> int:
        known = self._silent.get(address)
        return -1 if known is None else known.since_ns

    def record_timeout(self, address: Address, waited_ns: int) -> None:
        """Record that the master did not respond within `waited_ns`."""
        self._silent[address] = _Silence(self.clock_ns(), waited_ns, self.timeouts(address) + 1)

    def record_answer(self, address: Address) -> None:
        """Record a response of the master, or of its host."""
        self._silent.pop(address, None)

    def timeouts(self, address: Address) -> int:
        """Return the number of timeouts in a row."""
        known = self._silent.get(address)
        return 0 if known is None else known.times

    def may_skip(self, address: Address) -> bool:
        """Return True if a round may skip this master, because of a recent timeout."""
        known = self._silent.get(address)
        return known is not None and self.clock_ns() - known.since_ns < SKIP_FACTOR * known.waited_ns

    @property
    def has_several(self) -> bool:
        return len(self._given) + len(self._named) > 1

    def learn(self, text: str) -> Address:
        """Add an owner's address from a follower. Raises InvalidArgument: malformed."""
        address = parse_address(text)._replace(partition=self.owner.partition)
        if address not in self._given:
            self._named = (*(each for each in self._named if each != address), address)[-MAX_NAMED:]
        return address


class OwnerSearchRound:
    """One round over the masters, each asked at most once. An owner reported by a follower is next."""

    def __init__(self, masters: Masters, *, besides: Address | None = None) -> None:
        """`besides` is skipped, for example the silent former owner."""
        self._masters = masters
        self._waiting = deque(masters.in_order())
        self._asked = {besides}
        self._asked_ns = masters.clock_ns()
        self._named: set[Address] = set()
        self._failures: list[KVStoreError] = []
        self._is_told = False
        """True if a master has reported the owner, or that no owner exists."""

    def next(self) -> Address | None:
        """Return the next master to ask; then call `failed` or `is_owner`. None: the round is over.

        Recently silent masters are skipped if others respond and none reports them as the owner: waiting would delay
        the search.
        """
        while self._waiting:
            address = self._waiting.popleft()
            if address in self._asked:
                continue
            self._asked.add(address)
            if address in self._named or not (self._is_told and self._masters.may_skip(address)):
                self._asked_ns = self._masters.clock_ns()
                return address
        return None

    def failed(self, address: Address, error: KVStoreError) -> None:
        """Record a master that does not respond, or refuses; of several, a refusal's text gets the master's address."""
        self._asked.add(address)
        if isinstance(error, DeadlineExceeded):
            self._masters.record_timeout(address, self._masters.clock_ns() - self._asked_ns)
            error = Unavailable(f"{address} does not respond")
        else:
            self._masters.record_answer(address)
            if self._masters.has_several and not isinstance(error, Unavailable) and str(address) not in str(error):
                error = type(error)(f"{address}: {error}")
        self._is_told |= isinstance(error, NoOwner)
        self._failures.append(error)

    def is_owner(self, address: Address, welcome: Welcome) -> bool:
        """Return True if the sender of this Welcome is the owner, and then record it as the owner of `masters`."""
        if welcome.server != SERVER_MASTER:
            self.failed(address, Unavailable(f"{address} is {welcome.name!r}, not a master"))
        elif welcome.owner:
            self.failed(address, Unavailable(f"{address} follows the owner {welcome.owner}"))
            self._is_told = True
            self._follow(welcome.owner)
        else:
            self._masters.record_answer(address)
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
        """Drop the errors, which refer to their frames and so to this round."""
        self._failures.clear()

    def error(self) -> KVStoreError:
        """Return the error of a round without an owner: a refusal (Unauthorized, ProtocolError) if any.

        Else NoOwner if a master reported it, TooManyConnections if all masters are full, else Unavailable.
        """
        refusals = [failure for failure in self._failures if not isinstance(failure, Unavailable)]
        if refusals:
            return refusals[0]
        is_owner_expected = any(isinstance(failure, NoOwner) for failure in self._failures)
        causes = "; ".join(dict.fromkeys(map(str, self._failures))) or "there was no time to ask one"
        are_full = bool(self._failures) and all(isinstance(failure, TooManyConnections) for failure in self._failures)
        kind = NoOwner if is_owner_expected else TooManyConnections if are_full else Unavailable
        return kind(f"no master can be reached: {causes}")


def is_owner_expected(masters: Masters, error: KVStoreError) -> bool:
    """Return True if another round may find an owner after this error.

    Another round may succeed with several masters, or with a single one that is a follower.
    """
    return isinstance(error, NoOwner) or (isinstance(error, Unavailable) and masters.has_several)


def backoff_delays(first_s: float) -> Iterator[float]:
    """Yield the pauses between rounds, in seconds: doubling up to MAX_PAUSE_FACTOR times the first."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_PAUSE_FACTOR * first_s)


def probe_delays(patience_s: float, *, is_doubted: bool = False) -> Iterator[float]:
    """Yield the waits, in seconds, for a silent owner between search rounds among the others.

    The first is `patience_s` (unless `is_doubted`: it has passed already), later ones 1/PROBES of it, because an
    election is likely.
    """
    if not is_doubted:
        yield patience_s
    while True:
        yield patience_s / PROBES


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
    """Run one search round and return a channel to the owner.

    An attempt takes at most `attempt_s`, longer by as much for each timeout in a row, up to `max_attempt_s`. A master
    that is not asked for lack of time does not count as silent.

    Raises Unavailable: no master is the owner; or a master's refusal (Unauthorized, ProtocolError).
    """
    asking = OwnerSearchRound(masters, besides=besides)
    try:
        while deadline.up_to_s(attempt_s) and (address := asking.next()) is not None:
            patience_s = max(attempt_s, min((1 + masters.timeouts(address)) * attempt_s, max_attempt_s))
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
    """Repeat `find_owner` until the deadline, if there are several masters or the only one is a follower.

    `pause_s`: first pause.
    """
    waits = backoff_delays(pause_s)
    while True:
        try:
            return find_owner(masters, hello, deadline, attempt_s=attempt_s, tls=tls)
        except Unavailable as error:
            pause_s = next(waits)
            if not is_owner_expected(masters, error) or deadline.up_to_s(pause_s) < pause_s:
                raise
        time.sleep(pause_s)
