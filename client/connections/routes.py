"""Routes to masters and nodes: known addresses, the one in use, and the fallback. No I/O.

`ShmDiagnostics` logs why a local node is not reached through shared memory, each reason once: otherwise the only
symptom is a slow client.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from kvstore.protocol.master_messages import NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_MASTER, SERVER_NODE, Hello, Welcome
from kvstore.rpc.address import NOT_LOCAL, Address, parse_address
from kvstore.rpc.client.owners import Masters

WhyNotHere = Callable[[str, str], str]
"""Reason why a Unix socket with this path and host id is not usable here: `rpc.address.why_not_here`."""
MAX_LOGGED_REASONS: Final = 4096
"""Bound on the reasons remembered as logged; further ones are not logged."""
log = logging.getLogger("kvstore.client")


class ShmDiagnostics:
    """Why local nodes are not reached through shared memory, by node. Thread-safe."""

    def __init__(self, why_not_here: WhyNotHere) -> None:
        self._why_not_here = why_not_here
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}
        self._logged: set[tuple[str, str]] = set()

    def note(self, node: str, reason: str) -> None:
        """Set the node's reason, and log it if new."""
        with self._lock:
            self._reasons[node] = reason
            is_news = (node, reason) not in self._logged and len(self._logged) < MAX_LOGGED_REASONS
            if is_news:
                self._logged.add((node, reason))
        if is_news:
            log.warning("node %r of this host is not reached through shared memory: %s", node, reason)

    def refused(self, node: str, unix: str, host_id: str) -> None:
        """Record why the node's socket is not usable here; a node of another host has no reason."""
        reason = self._why_not_here(unix, host_id)
        if reason and reason != NOT_LOCAL:
            self.note(node, reason)

    def shared(self, node: str) -> None:
        """Clear the reason: the node is reached through shared memory."""
        with self._lock:
            self._reasons.pop(node, None)

    def keep(self, nodes: Iterable[str]) -> None:
        """Drop reasons of all other nodes."""
        kept = set(nodes)
        with self._lock:
            self._reasons = {node: reason for node, reason in self._reasons.items() if node in kept}

    def reasons(self) -> dict[str, str]:
        """Reason by node name."""
        with self._lock:
            return dict(self._reasons)


IsHere = Callable[[str, str], bool]
"""Test of a path: it is, on this host, the Unix socket of the daemon with that host id. `rpc.address.is_here`, or
`nowhere`."""


def nowhere(unix: str, host_id: str) -> bool:
    """For a client that uses no Unix sockets, or none of masters."""
    return False


class DaemonId(NamedTuple):
    """Identity of a daemon process: kind, name and host id of its Unix socket."""

    server: int
    name: str
    host_id: str


class DaemonRoute:
    """Route to one daemon: its Unix socket if usable, else its primary address.

    An address may be taken over by another daemon: check each connection with `is_meant`. A Unix socket that fails, or
    belongs to another daemon, is not used again until the daemon restarts. Threads may share a route: a race costs one
    connection attempt.
    """

    def __init__(self, primary: Address, is_here: IsHere, daemon_id: DaemonId | None = None) -> None:
        """`daemon_id` is the intended node. None: any master that answers at `primary`."""
        self.primary = primary
        self.daemon_id = daemon_id
        self._is_here = is_here
        self._is_master = daemon_id is None
        self._unix: Address | None = None
        self._epoch = self._refused_epoch = -1
        self.unix_failure = ""
        """Why the Unix socket is not used, though it is here."""
        self.hello: Hello | None = None
        """Hello for a node, with its ticket; None: the Hello for masters."""

    def address(self) -> Address:
        """The address to use now."""
        return self._unix or self.primary

    def offer(self, unix: str, host_id: str) -> None:
        """Use the Unix socket `unix` ("": none) if it is on this host."""
        if unix and self._is_here(unix, host_id):
            self._unix, self.unix_failure = Address(unix=unix, partition=self.primary.partition), ""

    def is_meant(self, address: Address, welcome: Welcome) -> bool:
        """Return whether the Welcome received at `address` is from the intended daemon."""
        if self._is_master and address is self.primary:
            return welcome.server == SERVER_MASTER
        return (welcome.server, welcome.name, welcome.host_id) == self.daemon_id

    def mismatch(self, address: Address, welcome: Welcome) -> str:
        """Error text for a connection to another daemon."""
        if self._is_master and address is self.primary:
            return f"{address} is {welcome.name!r}, not a master"
        return f"another daemon, {welcome.name!r}, listens at {address} now"

    def welcomed(self, welcome: Welcome) -> None:
        """Learn from a Welcome of the intended daemon; a new epoch means that it restarted."""
        if self._is_master:
            self.daemon_id = DaemonId(welcome.server, welcome.name, welcome.host_id)
        self._epoch = welcome.epoch
        if welcome.epoch != self._refused_epoch:
            self.offer(welcome.unix, welcome.host_id)

    def failed(self, address: Address, why: str) -> bool:
        """Mark `address` as failed: whether there is another one to try."""
        if address == self.primary:
            return False
        self._unix, self._refused_epoch, self.unix_failure = None, self._epoch, why
        return True

    @property
    def is_local(self) -> bool:
        return self.address().unix != ""


MAX_ROUTES: Final = 64
"""Bound on cached routes to masters; an operator names a handful."""


class MasterRoutes:
    """Routes to the masters for one partition: the configured addresses, in order, and owners that masters named."""

    served_epoch = 0
    """Epoch of the last owner that granted a reservation; a new owner knows no node yet."""
    is_doubted = False
    """A node waited for the owner in vain, and the owner has not answered since."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        is_here: IsHere,
        partition: int = 0,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises InvalidArgument: no address, or a malformed one."""
        texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        given = [parse_address(text.strip())._replace(partition=partition) for text in texts if text.strip()]
        self.known = Masters(given, clock_ns=clock_ns)
        self._is_here = is_here
        self._routes: dict[Address, DaemonRoute] = {}

    def to(self, address: Address) -> DaemonRoute:
        route = self._routes.get(address)
        if route is None:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            route = self._routes[address] = DaemonRoute(address, self._is_here)
        return route

    def to_owner(self) -> DaemonRoute:
        """Route to the presumed owner."""
        return self.to(self.known.owner)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as named by the master.

    `transfer` describes its transfer engine (b"": none); a change raises `revision`.
    """

    node_id: int
    name: str
    route: DaemonRoute
    revision: int = 0
    transfer: bytes = b""


class KnownNodes:
    """The nodes in the master's last table."""

    def __init__(self, is_here: IsHere, spread: int, shm_diagnostics: ShmDiagnostics, hello: Hello = Hello(ROLE_CLIENT)) -> None:  # noqa: B008
        """`spread` differs between clients of a host, so that they prefer different nodes. `shm_diagnostics` learns of
        local nodes without shared memory. `hello` is sent to nodes with their tickets; it has no token."""
        self._hello = hello
        self._is_here = is_here
        self._shm_diagnostics = shm_diagnostics
        self._spread = spread
        self._nodes: dict[int, KnownNode] = {}
        self._master_epoch = 0
        self.makes_hot_copies = False
        """The master makes hot copies, by its last reply."""
        self.local_id = 0
        """Preferred local node for writes; 0: none."""
        self.closed: set[int] = set()
        """Draining nodes, until the master grants a put at them again."""
        self.is_known = False
        """The current master has named a node; a new leader names none until nodes have registered."""
        self.version = 0
        """Rises with each change of the set of nodes."""

    def get(self, node_id: int) -> KnownNode | None:
        return self._nodes.get(node_id)

    def all(self) -> list[KnownNode]:
        """All live nodes."""
        return list(self._nodes.values())

    def open_local(self) -> KnownNode | None:
        """The preferred local node for writes, unless it is draining."""
        node = self._nodes.get(self.local_id)
        return None if node is None or node.node_id in self.closed else node

    def local(self) -> list[KnownNode]:
        """Local nodes, the preferred one first."""
        found = [node for node in self._nodes.values() if node.route.is_local]
        return sorted(found, key=lambda node: node.node_id != self.local_id)

    def is_local(self, node_id: int) -> bool:
        node = self._nodes.get(node_id)
        return node is not None and node.route.is_local

    @property
    def may_gain_better_replica(self) -> bool:
        """Return whether a remote block may get a better replica: on this host, or on a less loaded node."""
        return bool(self.local_id) or self.makes_hot_copies

    def preference(self, node_id: int) -> int:
        """Rank of a node among equals; the least is chosen. It differs between clients, so that load spreads, and is
        stable for a client, so that chains stay together."""
        return xxhash.xxh32_intdigest(b"%d" % node_id, self._spread)

    def is_live(self, daemon_id: DaemonId) -> bool:
        """Return whether the master's last table has this process."""
        return self.find(daemon_id) is not None

    def find(self, daemon_id: DaemonId) -> KnownNode | None:
        """This process in the master's last table, if there."""
        return next((node for node in self._nodes.values() if node.route.daemon_id == daemon_id), None)

    def has_route(self, route: DaemonRoute) -> bool:
        """Return whether the route leads to a node of the master's last table."""
        return any(node.route is route for node in self._nodes.values())

    def note_master_epoch(self, master_epoch: int) -> None:
        """Forget all nodes when a reply has another master epoch: node ids may be reassigned without a durable
        catalog."""
        if master_epoch != self._master_epoch:
            self._master_epoch, self._nodes, self.local_id, self.is_known = master_epoch, {}, 0, False
            self.closed = set()

    def replace(self, table: NodeTable) -> None:
        """Adopt the master's table. A node with the same process and address keeps its route, and an unchanged one its
        object."""
        nodes = {}
        tickets = table.tickets or [b""] * len(table.ids)
        for node_id, name, host, unix, tcp, revision, transfer, ticket in zip(
            table.ids, table.names, table.hosts, table.unix, table.tcp, table.revisions, table.transfers, tickets, strict=True
        ):
            primary, daemon_id = parse_address(tcp), DaemonId(SERVER_NODE, name, host)
            old = self._nodes.get(node_id)
            if old is not None and old.route.daemon_id == daemon_id and old.route.primary == primary:
                nodes[node_id] = old if old.revision == revision else dataclasses.replace(old, revision=revision, transfer=transfer)
                if old.route.hello is None or old.route.hello.ticket != ticket:
                    old.route.hello = dataclasses.replace(self._hello, ticket=ticket)
                continue
            nodes[node_id] = KnownNode(node_id, name, DaemonRoute(primary, self._is_here, daemon_id), revision, transfer)
            nodes[node_id].route.hello = dataclasses.replace(self._hello, ticket=ticket)
            nodes[node_id].route.offer(unix, host)
            if not nodes[node_id].route.is_local:
                self._shm_diagnostics.refused(name, unix, host)
        local = sorted(node_id for node_id, node in nodes.items() if node.route.is_local)
        if nodes != self._nodes:
            self.version += 1
        self._nodes = nodes
        self._shm_diagnostics.keep(table.names)
        if self.local_id not in local:  # keep it otherwise: a new local node would scatter the client's blocks
            self.local_id = local[self._spread % len(local)] if local else 0
        self.is_known |= bool(nodes)
