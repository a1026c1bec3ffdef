"""Requests to masters and nodes: connects to the intended daemon by its best address and sends one request.

Among several masters, the owner of the partition is found and followed. Sans-I/O: see effects.py.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore.client.config import ClientSettings
from kvstore.client.connections.routes import DaemonRoute, IsHere, KnownNode, KnownNodes, MasterRoutes, ShmDiagnostics, nowhere
from kvstore.client.core.effects import (
    AcquireConnectionEffect,
    AnyConnectionLease,
    Operation,
    ReceiveEffect,
    RequestEffect,
    SendEffect,
    SleepEffect,
    SpawnEffect,
)
from kvstore.protocol.errors import (
    DeadlineExceeded,
    Denied,
    InvalidTicket,
    KVStoreError,
    NoOwner,
    ProtocolError,
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

RETRIABLE_REQUESTS: Final = (Lookup, Exists, MatchPrefix, Nodes, Reserve, CancelReservations)
"""Requests that may go to another master while one is unresponsive: they change nothing, or reserve what ends with the
connection."""
RENEWAL_S: Final = 10.0
"""Deadline of a ticket renewal in the background."""
RENEWAL_PAUSE_NS: Final = 1_000_000_000
"""Pause before a failed renewal is retried."""


class ClusterConnections:
    """The masters and nodes that a client knows. Threads and tasks share it."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        is_here: IsHere,
        spread: int,
        shm_diagnostics: ShmDiagnostics,
        hello: Hello = Hello(ROLE_CLIENT),  # noqa: B008
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`hello` is sent to nodes, see KnownNodes. With a certificate, masters are reached over TCP only, because a
        Unix socket carries none; nodes accept a ticket instead. Raises InvalidArgument for a malformed address."""
        self._clock_ns = clock_ns
        self._given = settings.master
        self._master_is_here = nowhere if settings.tls_cert else is_here
        self.masters = self._routes_of(0)
        """Routes for partition 0."""
        self._owners = [self.masters]
        """Routes by partition."""
        self._partitions = 0
        """Number of partitions; 0: not known yet."""
        self._patience_s = settings.owner_patience_s
        self._retry_s = settings.owner_retry_s
        self.nodes = KnownNodes(is_here, spread, shm_diagnostics, hello)
        self._renew_ns = 0
        """Time at which half of the tickets' life is over and they are renewed in the background; 0: none, or renewal
        in progress."""
        self.shm_diagnostics = shm_diagnostics

    def begin(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyConnectionLease, M]]:
        """Send a request and keep the connection: (connection, reply). The caller returns the connection.

        Raises Unreachable when no address works.
        """
        while True:
            begun = yield from self._attempt(route, message, answer, deadline, payload)
            if begun is not None:
                return begun

    def begin_local(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline
    ) -> Operation[tuple[AnyConnectionLease, M] | None]:
        """As `begin`, over the Unix socket only: None if it does not work."""
        while route.is_local:
            begun = yield from self._attempt(route, message, answer, deadline)
            if begun is not None:
                return begun
        return None

    def _attempt(
        self, route: DaemonRoute, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyConnectionLease, M] | None]:
        """One attempt; None if another may work: an idle connection was closed by its peer, or there is another
        address."""
        connection = yield from self._connect(route, deadline)
        if connection is None:
            return None
        try:
            return connection, (yield RequestEffect(connection.channel, message, answer, deadline, payload))
        except BaseException as error:
            if _return_stale(connection, error):
                return None
            raise

    def _connect(self, route: DaemonRoute, deadline: Deadline) -> Operation[AnyConnectionLease | None]:
        """Acquire a connection to the intended daemon; None if a retry may succeed. Raises Unreachable, NoOwner.

        No request goes to another daemon: its reply would be a miss although the value exists.
        """
        address = route.address()
        try:
            connection: AnyConnectionLease = yield AcquireConnectionEffect(address, deadline, route.hello)
        except NoOwner:
            raise
        except InvalidTicket as error:
            yield from self._renew(route, error, deadline)
            return None
        except Unavailable as error:
            if route.failed(address, str(error)):
                return None
            raise (TooManyConnections if isinstance(error, TooManyConnections) else Unreachable)(str(error)) from None
        welcome = connection.channel.welcome
        if not route.is_meant(address, welcome):
            connection.discard()
            if connection.reused:
                return None  # an idle connection to the previous listener
            what = route.mismatch(address, welcome)
            if route.failed(address, what):
                return None
            raise Unreachable(what)
        if not connection.reused:
            route.welcomed(welcome)
            self._note_unix_failure(route)
        if self._renew_ns and self._clock_ns() >= self._renew_ns:
            self._renew_ns = 0
            try:
                yield SpawnEffect(self._renew_all())
            except RuntimeError:  # no thread available
                self._renew_ns = self._clock_ns() + RENEWAL_PAUSE_NS
        return connection

    def _renew(self, route: DaemonRoute, refusal: InvalidTicket, deadline: Deadline) -> Operation[None]:
        """Refresh the ticket of a node that rejected ours: the node restarted or the ticket expired.

        Raises `refusal` if the deadline ends first.
        """
        rejected = route.hello
        yield from self.refresh_nodes(deadline)
        if not self.nodes.has_route(route):
            raise Unreachable(f"the node at {route.primary} is not among the live nodes") from None
        if route.hello is rejected:  # the node registered a moment ago, and master and node have not exchanged keys yet
            if deadline.up_to_s(self._retry_s) < self._retry_s:
                raise refusal
            yield SleepEffect(self._retry_s)

    def _renew_all(self) -> Operation[None]:
        """Renew all tickets before they expire; the old ones stay in use while no master answers."""
        try:
            yield from self.refresh_nodes(Deadline(RENEWAL_S))
        except KVStoreError:
            self._renew_ns = self._clock_ns() + RENEWAL_PAUSE_NS

    def _note_unix_failure(self, route: DaemonRoute) -> None:
        """Report a local node that answers over TCP because its Unix socket failed."""
        if route.unix_failure and route.daemon_id is not None and route.daemon_id.server == SERVER_NODE:
            self.shm_diagnostics.note(route.daemon_id.name, route.unix_failure)

    def partitions(self, deadline: Deadline) -> Operation[int]:
        """Number of partitions of the key space, from the first master met. Raises as `call_master`."""
        if not self._partitions:
            connection, _none = yield from self._reach(None, Nodes, deadline, self.masters)
            connection.release()
        return self._partitions

    def _set_partitions(self, count: int) -> None:
        """Adopt the number of partitions that a master reports."""
        if count != self._partitions:
            self._owners = [self.masters, *map(self._routes_of, range(1, count))]
            self._partitions = count

    def suspect_owners(self, begun: Deadline) -> None:
        """A node asked to repeat a put. If that took the owner's patience, the node had waited for the owner; the other
        masters are asked sooner."""
        if begun.waited_s() >= self._patience_s:
            for masters in self._owners:
                masters.is_doubted = True

    def _routes_of(self, partition: int) -> MasterRoutes:
        return MasterRoutes(self._given, self._master_is_here, partition, clock_ns=lambda: self._clock_ns())

    def call_master(
        self, message: Message, answer: type[M], deadline: Deadline, *, note: Callable[[M], object] | None = None, partition: int = 0
    ) -> Operation[M]:
        """Send a request to the owner of the partition.

        With several masters known, the owner is awaited while there is none. A retriable request moves to another
        master that owns the partition by then. A reservation is repeated while a new owner knows no node yet.

        Raises Unavailable when no master answers as the owner: at once with a single master that names no owner,
        otherwise at the deadline.

        `note`, implemented in C, receives the reply before anything can be raised: an exception before that closes the
        connection.
        """
        masters = self._owners[partition]
        connection, reply = yield from self._reach(message, answer, deadline, masters)
        assert reply is not None, "a message was sent"
        if note is not None:
            note(reply)
        if masters is self.masters:
            self.nodes.note_master_epoch(connection.channel.welcome.epoch)
        elif isinstance(message, Reserve):
            masters.served_epoch = connection.channel.welcome.epoch
        self.nodes.makes_hot_copies = connection.channel.makes_hot_copies
        connection.release()
        return reply

    def _reach(
        self, message: Message | None, answer: type[M], deadline: Deadline, masters: MasterRoutes
    ) -> Operation[tuple[AnyConnectionLease, M | None]]:
        """The connection to the owner, and its reply; None for no message. See `call_master`."""
        waits = backoff_delays(self._retry_s)
        while True:
            search = OwnerSearchRound(masters.known)
            try:
                begun = yield from self._ask_owner(masters, search, message, answer, deadline)
                if begun is not None:
                    return begun
                if not (yield from self._find_owner(masters, search, deadline)):
                    pause_s = next(waits)
                    if not is_owner_expected(masters.known, search.error()) or deadline.up_to_s(pause_s) < pause_s:
                        raise search.error()
                    yield SleepEffect(pause_s)
            finally:
                search.end()

    def _ask_owner(
        self, masters: MasterRoutes, search: OwnerSearchRound, message: Message | None, answer: type[M], deadline: Deadline
    ) -> Operation[tuple[AnyConnectionLease, M | None] | None]:
        """Send the message to the presumed owner and keep the connection.

        None: it is not the owner, cannot be reached (`search` knows), or was unresponsive before, so that the others
        are asked first.
        """
        while True:
            route, known = masters.to_owner(), masters.known
            if known.has_several and known.timeouts(route.primary):
                return None
            try:
                try:
                    connection = yield from self._connect(route, deadline)
                except DeadlineExceeded as error:
                    search.failed(route.primary, error)
                    raise
                except (Denied, ProtocolError) as error:  # a wrong port, an expired certificate, an old tokens file of one master
                    search.failed(route.primary, error)
                    return None
                if connection is None:
                    continue
                if connection.channel.welcome.owner:
                    connection.discard()
                    search.is_owner(route.primary, connection.channel.welcome)
                    return None
                self._set_partitions(connection.channel.welcome.partitions)
                if message is None:
                    return connection, None
                reply = yield from self._answer(masters, connection, route, message, answer, deadline)
            except (Unreachable, NoOwner) as error:
                search.failed(route.primary, error)
                return None
            if reply is not None:
                return connection, reply

    def _answer(
        self,
        masters: MasterRoutes,
        connection: AnyConnectionLease,
        route: DaemonRoute,
        message: Message,
        answer: type[M],
        deadline: Deadline,
    ) -> Operation[M | None]:
        """Await the reply. None: the connection is returned, because its peer had closed it or another master is the
        owner now."""
        channel, known = connection.channel, masters.known
        try:
            if not known.has_several or not isinstance(message, RETRIABLE_REQUESTS):
                reply: M | None = yield RequestEffect(channel, message, answer, deadline)
                return reply
            yield SendEffect(channel, message, deadline)
            for wait_s in probe_delays(self._patience_s, is_doubted=masters.is_doubted):
                reply = yield ReceiveEffect(channel, answer, deadline.part(min(wait_s, deadline.left_s())))
                if reply is not None:
                    masters.is_doubted = False
                    return reply
                if (yield from self._has_new_owner(masters, route, deadline)):
                    break
            connection.discard()
            return None
        except BaseException as error:
            if _return_stale(connection, error):
                return None
            if known.has_several and self._is_transient(masters, error, message, channel.welcome):
                raise Unreachable(f"{route.primary}: {error}") from None
            raise

    def _has_new_owner(self, masters: MasterRoutes, route: DaemonRoute, deadline: Deadline) -> Operation[bool]:
        """Return whether another master claims to be the owner."""
        search = OwnerSearchRound(masters.known, besides=route.primary)
        try:
            return (yield from self._find_owner(masters, search, deadline))
        finally:
            search.end()

    def _is_transient(self, masters: MasterRoutes, error: BaseException, message: Message, welcome: Welcome) -> bool:
        """Return whether the refusal is due to a failover: the master is being deposed, or nodes have not registered with the
        new one yet."""
        if isinstance(error, StaleEpoch):
            return True
        if not isinstance(error, Unavailable):
            return False
        if masters is not self.masters:
            return isinstance(message, Reserve) and welcome.epoch != masters.served_epoch
        self.nodes.note_master_epoch(welcome.epoch)
        return isinstance(message, Reserve) and not self.nodes.is_known

    def _find_owner(self, masters: MasterRoutes, search: OwnerSearchRound, deadline: Deadline) -> Operation[bool]:
        """Ask the masters not asked yet, within the deadline, until one claims to be the owner; it becomes the current
        one."""
        while deadline.up_to_s(self._patience_s) and (address := search.next()) is not None:
            try:
                connection = yield from self._connect_new(masters.to(address), deadline.part(self._patience_s))
            except KVStoreError as error:
                search.failed(address, error)
                continue
            if search.is_owner(address, connection.channel.welcome):
                masters.is_doubted = False
                connection.release()
                return True
            connection.discard()
        return False

    def _connect_new(self, route: DaemonRoute, deadline: Deadline) -> Operation[AnyConnectionLease]:
        """Open a new connection: its Welcome is current."""
        while True:
            connection = yield from self._connect(route, deadline)
            if connection is not None and not connection.reused:
                return connection
            if connection is not None:
                connection.discard()

    def refresh_nodes(self, deadline: Deadline) -> Operation[None]:
        table = yield from self.call_master(Nodes(), NodeTable, deadline)
        self.nodes.replace(table)
        self._renew_ns = self._clock_ns() + table.ticket_ms * 500_000 if table.ticket_ms else 0

    def find_node(self, node_id: int, deadline: Deadline) -> Operation[KnownNode | None]:
        """The node, refreshed from the master if unknown; None if the master does not know it."""
        if self.nodes.get(node_id) is None:
            yield from self.refresh_nodes(deadline)
        return self.nodes.get(node_id)

    def node_to_avoid(self, node_id: int, deadline: Deadline) -> Operation[int]:
        """After a failed connection: the node's id, or 0 if the master has a new address for it."""
        old = self.nodes.get(node_id)
        yield from self.refresh_nodes(deadline)
        new = self.nodes.get(node_id)
        return node_id if new is None or new is old else 0


def _return_stale(connection: AnyConnectionLease, error: BaseException) -> bool:
    """Return a connection whose request raised `error`: whether it was an idle one that its peer had closed.

    Raises Unreachable for a new connection that broke.
    """
    broke = isinstance(error, Unavailable) and not connection.channel.is_open
    connection.release(error)
    if broke and not connection.reused:
        raise Unreachable(str(error)) from None
    return broke
