"""How to reach the masters and the nodes: addresses known, the one to use now, and what to do when it does not answer. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.master_messages import NodeTable
from kvstore.protocol.session_messages import Welcome
from kvstore.rpc.address import Address, parse_address


class Route:
    """The way to one daemon: its Unix socket when it is on this host, else its primary address.

    A socket file that cannot be reached though the daemon lives (another mount namespace) is left alone until the daemon's next
    process. Threads may share a route: a race costs a connection attempt, no more.
    """

    def __init__(self, primary: Address, host_id: str) -> None:
        self.primary = primary
        self._host_id = host_id
        self._unix: Address | None = None
        self._epoch = self._refused_epoch = -1

    def address(self) -> Address:
        """The one to use now."""
        return self._unix or self.primary

    def offer(self, unix: str, host_id: str) -> None:
        """The daemon listens on the Unix socket `unix` ("": on none) of the host `host_id`."""
        if unix and host_id == self._host_id:
            self._unix = Address(unix=unix)

    def welcomed(self, welcome: Welcome) -> None:
        """The daemon answered, on either address. Its epoch tells a new process of it."""
        self._epoch = welcome.epoch
        if welcome.epoch != self._refused_epoch:
            self.offer(welcome.unix, welcome.host_id)

    def failed(self, address: Address) -> bool:
        """`address` could not be reached; is there another one to try?"""
        if address == self.primary:
            return False
        self._unix, self._refused_epoch = None, self._epoch
        return True

    @property
    def is_local(self) -> bool:
        return self.address().unix != ""


class Masters:
    """The masters in the order given; sticks to one that works."""

    def __init__(self, addresses: str | Sequence[str], host_id: str) -> None:
        """Raises InvalidArgument: no address, or a malformed one."""
        texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self._routes = [Route(parse_address(text.strip()), host_id) for text in texts if text.strip()]
        if not self._routes:
            raise InvalidArgument("a client needs the address of at least one master")
        self._current = self._routes[0]

    def in_order(self) -> list[Route]:
        """All of them, from the one in use on."""
        at = self._routes.index(self._current)
        return self._routes[at:] + self._routes[:at]

    def stick_to(self, route: Route) -> None:
        """This one answered."""
        self._current = route


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as the master told of it. `transfer` is how its engine is reached, in the engine's own bytes (b"": by frames only);
    it may change while the node lives, and `revision` rises then."""

    node_id: int
    name: str
    route: Route
    revision: int = 0
    transfer: bytes = b""


class KnownNodes:
    """The nodes as the master named them last."""

    def __init__(self, host_id: str, spread: int) -> None:
        """`spread` differs between the clients of a host, so that they do not all prefer the same one of its nodes."""
        self._host_id = host_id
        self._spread = spread
        self._nodes: dict[int, KnownNode] = {}
        self._master_epoch = 0
        self.local_id = 0
        """The node of this host to be preferred for writing, 0 if there is none."""
        self.is_known = False

    def get(self, node_id: int) -> KnownNode | None:
        return self._nodes.get(node_id)

    def is_local(self, node_id: int) -> bool:
        node = self._nodes.get(node_id)
        return node is not None and node.route.is_local

    def heard_from(self, master_epoch: int) -> None:
        """A master of this epoch answered. Ids of another's are forgotten: one without a catalog that lasts gives them anew."""
        if master_epoch != self._master_epoch:
            self._master_epoch, self._nodes, self.local_id, self.is_known = master_epoch, {}, 0, False

    def replace(self, table: NodeTable) -> None:
        """Take over the master's answer. What was learned about the way to a node that has not moved is kept, and a node of which
        nothing has changed stays the same object."""
        nodes = {}
        for node_id, name, host, unix, tcp, revision, transfer in zip(
            table.ids, table.names, table.hosts, table.unix, table.tcp, table.revisions, table.transfers, strict=True
        ):
            primary = parse_address(tcp)
            old = self._nodes.get(node_id)
            if old is not None and old.name == name and old.route.primary == primary:
                nodes[node_id] = old if old.revision == revision else replace(old, revision=revision, transfer=transfer)
                continue
            nodes[node_id] = KnownNode(node_id, name, Route(primary, self._host_id), revision, transfer)
            nodes[node_id].route.offer(unix, host)
        local = sorted(node_id for node_id, node in nodes.items() if node.route.is_local)
        self._nodes = nodes
        self.local_id = local[self._spread % len(local)] if local else 0
        self.is_known = True
