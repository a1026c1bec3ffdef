"""How a client reaches masters and nodes: a channel to the daemon that is meant, by the best address that works, and one question to it.
Of several masters the one that owns the partition asked about is meant. Sans-I/O: see effects.py."""

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore.client.config import ClientSettings
from kvstore.client.connections.routes import DaemonRoute, IsHere, KnownNode, KnownNodes, MasterRoutes, ShmDiagnostics, nowhere
from kvstore.client.core.effects import (
    AcquireConnectionEffect,
    AnyLoan,
    Operation,
    ReceiveEffect,
    RequestEffect,
    SendEffect,
    SleepEffect,
    SpawnEffect,
)
from kvstore.protocol.errors import (
    DeadlineExceeded,
    InvalidTicket,
    KVStoreError,
    NoOwner,
    StaleEpoch,
    TooManyConnections,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.master_messages import CancelReservations, Exists, Lookup, MatchPrefix, Nodes, NodeTable, Reserve
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_NODE, Hello, Welcome
from kvstore.rpc.client.owners import OwnerSearchRound, backoff_delays, is_owner_expected, probe_delays
from kvstore.rpc.deadline import Deadline

M = TypeVar("M", bound=Message)

ASKED_AGAIN: Final = (Lookup, Exists, MatchPrefix, Nodes, Reserve, CancelReservations)
"""What another master may be asked as well while one has not answered: nothing changes, or what was reserved ends with the connection."""
RENEWAL_S: Final = 10.0
"""For asking for tickets in the background."""
RENEWAL_PAUSE_NS: Final = 1_000_000_000
"""Before that is tried again."""


class ClusterConnections:
    """The masters and nodes that a client knows. Its threads and tasks share it."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        is_here: IsHere,
        spread: int,
        unshared: ShmDiagnostics,
        hello: Hello = Hello(ROLE_CLIENT),  # noqa: B008
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """For `hello` see KnownNodes. With a certificate masters are reached over TCP only: a Unix socket shows none. Nodes take a ticket
        in its place. Raises InvalidArgument for a malformed address."""
        self._clock_ns = clock_ns
        self._given = settings.master
        self._master_is_here = nowhere if settings.tls_cert else is_here
        self.masters = self._routes_of(0)
        """For what partition 0 is asked."""
        self._owners = [self.masters]
        """By partition."""
        self._partitions = 0
        """How many there are; 0: no master has been met yet."""
        self._patience_s = settings.owner_patience_s
        self._retry_s = settings.owner_retry_s
        self.nodes = KnownNodes(is_here, spread, unshared, hello)
        self._renew_ns = 0
        """When tickets are half over, and are asked for anew in the background; 0: there are none, or that is being done."""
        self.unshared = unshared

    def begin(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M]]:
        """Ask a daemon and keep the channel: (loan, answer). The caller gives the loan back. Raises Unreachable when no address works."""
        while True:
            begun = yield from self._attempt(route, message, answer, deadline, payload)
            if begun is not None:
                return begun

    def begin_shared(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline
    ) -> Operation[tuple[AnyLoan, M] | None]:
        """As `begin`, through the Unix socket only: None when there is no way through it."""
        while route.is_local:
            begun = yield from self._attempt(route, message, answer, deadline)
            if begun is not None:
                return begun
        return None

    def _attempt(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M] | None]:
        """One channel's try; None when another one may work: an idle one's peer has gone since, or there is another address."""
        loan = yield from self._connect(route, deadline)
        if loan is None:
            return None
        try:
            return loan, (yield RequestEffect(loan.channel, message, answer, deadline, payload))
        except BaseException as error:
            if _gives_back_stale(loan, error):
                return None
            raise

    def _connect(self, route: DaemonRoute, deadline: Deadline) -> Operation[AnyLoan | None]:
        """A channel to the daemon that is meant; None when the next try may give one: a new one, or one to another address. Raises
        Unreachable, or NoOwner.

        Nothing is asked of a daemon that is not the one meant: its answer would be a miss where the value is there.
        """
        address = route.address()
        try:
            loan: AnyLoan = yield AcquireConnectionEffect(address, deadline, route.hello)
        except NoOwner:
            raise
        except InvalidTicket as error:
            yield from self._renew(route, error, deadline)
            return None
        except Unavailable as error:
            if route.failed(address, str(error)):
                return None
            raise (TooManyConnections if isinstance(error, TooManyConnections) else Unreachable)(str(error)) from None
        welcome = loan.channel.welcome
        if not route.is_meant(address, welcome):
            loan.discard()
            if loan.reused:
                return None  # it is of who listened there before
            what = route.mismatch(address, welcome)
            if route.failed(address, what):
                return None
            raise Unreachable(what)
        if not loan.reused:
            route.welcomed(welcome)
            self._note_trouble(route)
        if self._renew_ns and self._clock_ns() >= self._renew_ns:
            self._renew_ns = 0
            try:
                yield SpawnEffect(self._renew_all())
            except RuntimeError:  # the system has no thread for it
                self._renew_ns = self._clock_ns() + RENEWAL_PAUSE_NS
        return loan

    def _renew(self, route: DaemonRoute, refusal: InvalidTicket, deadline: Deadline) -> Operation[None]:
        """Another ticket for a node that did not take the one that it was shown: it is another process by now, or the ticket has ended.
        Raises `refusal` where the deadline is over before there is one."""
        shown = route.hello
        yield from self.refresh_nodes(deadline)
        if not self.nodes.are_by(route):
            raise Unreachable(f"at {route.primary} there is no node any more that the master knows") from None
        if route.hello is shown:  # the node has registered a moment ago, and the master does not know of it, or it of its key
            if deadline.up_to_s(self._retry_s) < self._retry_s:
                raise refusal
            yield SleepEffect(self._retry_s)

    def _renew_all(self) -> Operation[None]:
        """Other tickets, before those that there are have ended; those go on being used while no master gives any."""
        try:
            yield from self.refresh_nodes(Deadline(RENEWAL_S))
        except KVStoreError:
            self._renew_ns = self._clock_ns() + RENEWAL_PAUSE_NS

    def _note_trouble(self, route: DaemonRoute) -> None:
        """A node that answers though its socket did not is there, and slower than it need be."""
        if route.trouble and route.who is not None and route.who.server == SERVER_NODE:
            self.unshared.note(route.who.name, route.trouble)

    def partitions(self, deadline: Deadline) -> Operation[int]:
        """How many parts the cluster's key space has, as a master said when it was met. Raises as `ask_master`."""
        if not self._partitions:
            loan, _none = yield from self._reach(None, Nodes, deadline, self.masters)
            loan.release()
        return self._partitions

    def _met(self, count: int) -> None:
        """A master says that there are so many partitions."""
        if count != self._partitions:
            self._owners = [self.masters, *map(self._routes_of, range(1, count))]
            self._partitions = count

    def doubt_owners(self, begun: Deadline) -> None:
        """A node has said that a put is to be asked for once more. If that took as long as an owner is given to answer, the node has waited
        for one, which need not be given as long once more before the others are asked."""
        if begun.waited_s() >= self._patience_s:
            for masters in self._owners:
                masters.is_doubted = True

    def _routes_of(self, partition: int) -> MasterRoutes:
        return MasterRoutes(self._given, self._master_is_here, partition, clock_ns=lambda: self._clock_ns())

    def ask_master(
        self, message: Message, answer: type[M], deadline: Deadline, *, note: Callable[[M], object] | None = None, partition: int = 0
    ) -> Operation[M]:
        """Ask the master that owns the partition. Where several are known, or one follows the catalog, it is waited for if there is none
        now; and one that does not answer what may be asked again is left for another one that owns the catalog by then. Room is asked for
        again where the owner has just taken over and knows no node yet.

        Raises Unavailable when no master answers as the owner: at once where one is known and says nothing of owners, else at the deadline.

        `note`, a function of C, gets the answer before anything can be raised: until it has it, the connection is closed by whatever is.
        """
        masters = self._owners[partition]
        loan, reply = yield from self._reach(message, answer, deadline, masters)
        assert reply is not None, "it was asked something"
        if note is not None:
            note(reply)
        if masters is self.masters:
            self.nodes.heard_from(loan.channel.welcome.epoch)
        elif isinstance(message, Reserve):
            masters.served_epoch = loan.channel.welcome.epoch
        self.nodes.makes_hot_copies = loan.channel.makes_hot_copies
        loan.release()
        return reply

    def _reach(
        self, message: Message | None, answer: type[M], deadline: Deadline, masters: MasterRoutes
    ) -> Operation[tuple[AnyLoan, M | None]]:
        """The channel to the owner, and what it answered; None where it was not asked anything. See `ask_master`."""
        waits = backoff_delays(self._retry_s)
        while True:
            asking = OwnerSearchRound(masters.known)
            try:
                begun = yield from self._ask_owner(masters, asking, message, answer, deadline)
                if begun is not None:
                    return begun
                if not (yield from self._find_owner(masters, asking, deadline)):
                    pause_s = next(waits)
                    if not is_owner_expected(masters.known, asking.error()) or deadline.up_to_s(pause_s) < pause_s:
                        raise asking.error()
                    yield SleepEffect(pause_s)
            finally:
                asking.end()

    def _ask_owner(
        self, masters: MasterRoutes, asking: OwnerSearchRound, message: Message | None, answer: type[M], deadline: Deadline
    ) -> Operation[tuple[AnyLoan, M | None] | None]:
        """Ask the master that is the owner as far as is known, and keep the channel. None: it is not, or cannot be reached, `asking` has
        been told; or it kept a call waiting to its end, so that the others are to be asked first."""
        while True:
            route, known = masters.to_owner(), masters.known
            if known.has_several and known.timeouts(route.primary):
                return None
            try:
                try:
                    loan = yield from self._connect(route, deadline)
                except DeadlineExceeded as error:
                    asking.failed(route.primary, error)
                    raise
                if loan is None:
                    continue
                if loan.channel.welcome.owner:
                    loan.discard()
                    asking.is_owner(route.primary, loan.channel.welcome)
                    return None
                self._met(loan.channel.welcome.partitions)
                if message is None:
                    return loan, None
                reply = yield from self._answer(masters, loan, route, message, answer, deadline)
            except (Unreachable, NoOwner) as error:
                asking.failed(route.primary, error)
                return None
            if reply is not None:
                return loan, reply

    def _answer(
        self, masters: MasterRoutes, loan: AnyLoan, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline
    ) -> Operation[M | None]:
        """What the master says. None: the channel is given back, for it was idle and its peer has gone since, or another master owns the
        catalog by now."""
        channel, known = loan.channel, masters.known
        try:
            if not known.has_several or not isinstance(message, ASKED_AGAIN):
                reply: M | None = yield RequestEffect(channel, message, answer, deadline)
                return reply
            yield SendEffect(channel, message, deadline)
            for wait_s in probe_delays(self._patience_s, is_doubted=masters.is_doubted):
                reply = yield ReceiveEffect(channel, answer, deadline.part(min(wait_s, deadline.left_s())))
                if reply is not None:
                    masters.is_doubted = False
                    return reply
                if (yield from self._is_another(masters, route, deadline)):
                    break
            loan.discard()
            return None
        except BaseException as error:
            if _gives_back_stale(loan, error):
                return None
            if known.has_several and self._is_passing(masters, error, message, channel.welcome):
                raise Unreachable(f"{route.primary}: {error}") from None
            raise

    def _is_another(self, masters: MasterRoutes, route: DaemonRoute, deadline: Deadline) -> Operation[bool]:
        """Whether one of the other masters says that it is the owner."""
        asking = OwnerSearchRound(masters.known, besides=route.primary)
        try:
            return (yield from self._find_owner(masters, asking, deadline))
        finally:
            asking.end()

    def _is_passing(self, masters: MasterRoutes, error: BaseException, message: Message, welcome: Welcome) -> bool:
        """Whether a master has refused because it is about to stand by, or has just taken over and nodes have not found it yet."""
        if isinstance(error, StaleEpoch):
            return True
        if not isinstance(error, Unavailable):
            return False
        if masters is not self.masters:
            return isinstance(message, Reserve) and welcome.epoch != masters.served_epoch
        self.nodes.heard_from(welcome.epoch)
        return isinstance(message, Reserve) and not self.nodes.is_known

    def _find_owner(self, masters: MasterRoutes, asking: OwnerSearchRound, deadline: Deadline) -> Operation[bool]:
        """Ask who has not been asked yet, while there is time, until one says that it is the owner; it is the one in use then."""
        while deadline.up_to_s(self._patience_s) and (address := asking.next()) is not None:
            try:
                loan = yield from self._introduce(masters.to(address), deadline.part(self._patience_s))
            except KVStoreError as error:
                asking.failed(address, error)
                continue
            if asking.is_owner(address, loan.channel.welcome):
                masters.is_doubted = False
                loan.release()
                return True
            loan.discard()
        return False

    def _introduce(self, route: DaemonRoute, deadline: Deadline) -> Operation[AnyLoan]:
        """A new channel: what the master says of itself over it holds now."""
        while True:
            loan = yield from self._connect(route, deadline)
            if loan is not None and not loan.reused:
                return loan
            if loan is not None:
                loan.discard()

    def refresh_nodes(self, deadline: Deadline) -> Operation[None]:
        table = yield from self.ask_master(Nodes(), NodeTable, deadline)
        self.nodes.replace(table)
        self._renew_ns = self._clock_ns() + table.ticket_ms * 500_000 if table.ticket_ms else 0

    def find_node(self, node_id: int, deadline: Deadline) -> Operation[KnownNode | None]:
        """None for a node that the master does not know either."""
        if self.nodes.get(node_id) is None:
            yield from self.refresh_nodes(deadline)
        return self.nodes.get(node_id)

    def node_to_avoid(self, node_id: int, deadline: Deadline) -> Operation[int]:
        """After a node could not be reached: its id, or 0 if the master knows it at another place by now."""
        old = self.nodes.get(node_id)
        yield from self.refresh_nodes(deadline)
        new = self.nodes.get(node_id)
        return node_id if new is None or new is old else 0


def _gives_back_stale(loan: AnyLoan, error: BaseException) -> bool:
    """Give back a channel over which nothing was answered, but `error` raised: whether it was idle, and its peer has gone since. Raises
    Unreachable for one that was not, and broke."""
    broke = isinstance(error, Unavailable) and not loan.channel.is_open
    loan.release(error)
    if broke and not loan.reused:
        raise Unreachable(str(error)) from None
    return broke
