"""How to reach the masters and the nodes: addresses known, the one to use now, and what to do when it does not answer. No I/O.

Where a client does not reach a node of this host through shared memory it logs why, each reason once: the operator would else see nothing
but that the client is slow.
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
"""rpc.address.why_not_here."""
MAX_TOLD: Final = 4096
"""Reasons that are kept in mind as logged; beyond that nothing is logged."""
log = logging.getLogger("kvstore.client")


class ShmDiagnostics:
    """Thread-safe."""

    def __init__(self, why_not_here: WhyNotHere) -> None:
        self._why_not_here = why_not_here
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()

    def note(self, node: str, reason: str) -> None:
        """It is so from now on."""
        with self._lock:
            self._reasons[node] = reason
            is_news = (node, reason) not in self._told and len(self._told) < MAX_TOLD
            if is_news:
                self._told.add((node, reason))
        if is_news:
            log.warning("node %r of this host is not reached through shared memory: %s", node, reason)

    def refused(self, node: str, unix: str, host_id: str) -> None:
        """The node named with this socket is not here: nothing to tell of one on another host."""
        reason = self._why_not_here(unix, host_id)
        if reason and reason != NOT_LOCAL:
            self.note(node, reason)

    def shared(self, node: str) -> None:
        """It is reached now."""
        with self._lock:
            self._reasons.pop(node, None)

    def keep(self, nodes: Iterable[str]) -> None:
        """There are no other nodes any more."""
        kept = set(nodes)
        with self._lock:
            self._reasons = {node: reason for node, reason in self._reasons.items() if node in kept}

    def reasons(self) -> dict[str, str]:
        """By node."""
        with self._lock:
            return dict(self._reasons)


IsHere = Callable[[str, str], bool]
"""Whether a path is here the Unix socket of which a daemon told this host id: rpc.address.is_here, or `nowhere`."""


def nowhere(unix: str, host_id: str) -> bool:
    """For a client that uses no Unix sockets, or none of masters."""
    return False


class DaemonId(NamedTuple):
    """Which daemon: a process is told from every other by its kind, its name and the host id of its Unix socket."""

    server: int
    name: str
    host_id: str


class DaemonRoute:
    """The way to one daemon: its Unix socket where that is to be had, else its primary address.

    An address is only where somebody answers: whether that is the daemon meant is to be asked of `is_meant` each time. A socket file
    that cannot be reached, or is another's, though the daemon lives is left alone until the daemon's next process. Threads may share a
    route: a race costs a connection attempt, no more.
    """

    def __init__(self, primary: Address, is_here: IsHere, who: DaemonId | None = None) -> None:
        """`who` is the node meant, as its master told. None: a master, whichever it is that answers at `primary`."""
        self.primary = primary
        self.who = who
        self._is_here = is_here
        self._is_master = who is None
        self._unix: Address | None = None
        self._epoch = self._refused_epoch = -1
        self.trouble = ""
        """Why its Unix socket, which is here, is left alone."""
        self.hello: Hello | None = None
        """What a node is told, its ticket in it; None: what masters are told."""

    def address(self) -> Address:
        """The one to use now."""
        return self._unix or self.primary

    def offer(self, unix: str, host_id: str) -> None:
        """The daemon listens on the Unix socket `unix` ("": on none), which is the one told of as `host_id`."""
        if unix and self._is_here(unix, host_id):
            self._unix, self.trouble = Address(unix=unix, partition=self.primary.partition), ""

    def is_meant(self, address: Address, welcome: Welcome) -> bool:
        """Is it the daemon of this route that introduced itself so at `address`?"""
        if self._is_master and address is self.primary:
            return welcome.server == SERVER_MASTER
        return (welcome.server, welcome.name, welcome.host_id) == self.who

    def mismatch(self, address: Address, welcome: Welcome) -> str:
        """Who answers at `address` in place of the daemon that is meant."""
        if self._is_master and address is self.primary:
            return f"{address} is {welcome.name!r}, which is no master"
        return f"at {address} there is another daemon by now, {welcome.name!r}"

    def welcomed(self, welcome: Welcome) -> None:
        """The daemon meant answered, on either address. Its epoch tells a new process of it."""
        if self._is_master:
            self.who = DaemonId(welcome.server, welcome.name, welcome.host_id)
        self._epoch = welcome.epoch
        if welcome.epoch != self._refused_epoch:
            self.offer(welcome.unix, welcome.host_id)

    def failed(self, address: Address, why: str) -> bool:
        """`address` could not be reached, or is another's; is there another one to try?"""
        if address == self.primary:
            return False
        self._unix, self._refused_epoch, self.trouble = None, self._epoch, why
        return True

    @property
    def is_local(self) -> bool:
        return self.address().unix != ""


MAX_ROUTES: Final = 64
"""To masters of which something was learned; an operator names a handful."""


class MasterRoutes:
    """The ways to the masters, for what one partition is asked: to those given, in that order, and to owners that they named."""

    served_epoch = 0
    """Of the last owner that has granted a put: one that has just taken over knows no node yet."""
    is_doubted = False
    """A node has waited for the owner in vain, and nothing has been heard of it since."""

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
        """To the one that is the owner, as far as is known."""
        return self.to(self.known.owner)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as the master told of it. `transfer` is how its engine is reached, in the engine's own bytes (b"": by frames only);
    it may change while the node lives, and `revision` rises then."""

    node_id: int
    name: str
    route: DaemonRoute
    revision: int = 0
    transfer: bytes = b""


class KnownNodes:
    """The nodes as the master named them last."""

    def __init__(self, is_here: IsHere, spread: int, unshared: ShmDiagnostics, hello: Hello = Hello(ROLE_CLIENT)) -> None:  # noqa: B008
        """`spread` differs between the clients of a host, so that they do not all prefer the same one of its nodes, nor of the others.
        `unshared` is told of nodes of this host that cannot be reached as such. `hello` is what nodes are told, but for their tickets: not
        the token."""
        self._hello = hello
        self._is_here = is_here
        self._unshared = unshared
        self._spread = spread
        self._nodes: dict[int, KnownNode] = {}
        self._master_epoch = 0
        self.makes_hot_copies = False
        """The master has blocks copied to further nodes when they are read much, as it said last."""
        self.local_id = 0
        """The node of this host to be preferred for writing, 0 if there is none."""
        self.closed: set[int] = set()
        """Nodes that said that they take no new blocks, until the master grants a put at them again."""
        self.is_known = False
        """The master, as of its epoch, has named one at least: one that has just taken over knows none before they have found it."""
        self.version = 0
        """Rises whenever the master named other nodes than before."""

    def get(self, node_id: int) -> KnownNode | None:
        return self._nodes.get(node_id)

    def open_local(self) -> KnownNode | None:
        """The node of this host to be preferred for writing, if it takes new blocks."""
        node = self._nodes.get(self.local_id)
        return None if node is None or node.node_id in self.closed else node

    def local(self) -> list[KnownNode]:
        """The nodes of this host, the one to be preferred first."""
        found = [node for node in self._nodes.values() if node.route.is_local]
        return sorted(found, key=lambda node: node.node_id != self.local_id)

    def is_local(self, node_id: int) -> bool:
        node = self._nodes.get(node_id)
        return node is not None and node.route.is_local

    @property
    def may_come_nearer(self) -> bool:
        """A block of another host may be at a better place after a while: on this host, or where fewer ask for it."""
        return bool(self.local_id) or self.makes_hot_copies

    def turn(self, node_id: int) -> int:
        """Of nodes that are as good the one with the least is to be asked: another one for each client, and for all keys of a client the
        same, so that clients spread and chains stay together."""
        return xxhash.xxh32_intdigest(b"%d" % node_id, self._spread)

    def is_live(self, who: DaemonId) -> bool:
        """Whether the master named this very process last."""
        return self.by(who) is not None

    def by(self, who: DaemonId) -> KnownNode | None:
        """This very process, if the master named it last."""
        return next((node for node in self._nodes.values() if node.route.who == who), None)

    def are_by(self, route: DaemonRoute) -> bool:
        """Whether one of those that the master named last is reached by this route."""
        return any(node.route is route for node in self._nodes.values())

    def heard_from(self, master_epoch: int) -> None:
        """A master of this epoch answered. Ids of another's are forgotten: one without a catalog that lasts gives them anew."""
        if master_epoch != self._master_epoch:
            self._master_epoch, self._nodes, self.local_id, self.is_known = master_epoch, {}, 0, False
            self.closed = set()

    def replace(self, table: NodeTable) -> None:
        """Take over the master's answer. What was learned about the way to a node that is the same process at the same place is kept, and a
        node of which nothing has changed stays the same object."""
        nodes = {}
        tickets = table.tickets or [b""] * len(table.ids)
        for node_id, name, host, unix, tcp, revision, transfer, ticket in zip(
            table.ids, table.names, table.hosts, table.unix, table.tcp, table.revisions, table.transfers, tickets, strict=True
        ):
            primary, who = parse_address(tcp), DaemonId(SERVER_NODE, name, host)
            old = self._nodes.get(node_id)
            if old is not None and old.route.who == who and old.route.primary == primary:
                nodes[node_id] = old if old.revision == revision else dataclasses.replace(old, revision=revision, transfer=transfer)
                if old.route.hello is None or old.route.hello.ticket != ticket:
                    old.route.hello = dataclasses.replace(self._hello, ticket=ticket)
                continue
            nodes[node_id] = KnownNode(node_id, name, DaemonRoute(primary, self._is_here, who), revision, transfer)
            nodes[node_id].route.hello = dataclasses.replace(self._hello, ticket=ticket)
            nodes[node_id].route.offer(unix, host)
            if not nodes[node_id].route.is_local:
                self._unshared.refused(name, unix, host)
        local = sorted(node_id for node_id, node in nodes.items() if node.route.is_local)
        if nodes != self._nodes:
            self.version += 1
        self._nodes = nodes
        self._unshared.keep(table.names)
        if self.local_id not in local:  # else what one client puts would be scattered by each node that comes to its host
            self.local_id = local[self._spread % len(local)] if local else 0
        self.is_known |= bool(nodes)
