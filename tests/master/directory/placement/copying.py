"""Fixture of the tests of copies: a node with three blocks, nodes that a test adds, and orders that are carried out."""

from collections.abc import Callable

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.membership.members import NodeInfo, NodeMember
from kvstore.master.directory.placement.copies import CopyOrder
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import EVENT_REMOVED, CopyResult
from tests.master.blocks import TENANT, Event, Master, tier_of

KEYS = [b"a", b"b", b"c"]
ROOM = tier_of(capacity_bytes=100_000)


class Copying:
    """The node `one` at host x, which holds KEYS of 100 bytes each, and what a test adds."""

    def __init__(self, limits: DirectoryLimits, *, tier: pb.TierStatus = ROOM, parents: list[bytes] = [b""] * 3) -> None:  # noqa: B006 - not changed
        self.master = Master(limits=limits)
        events = [Event(key, generation, parent=parents[generation - 1]) for generation, key in enumerate(KEYS, start=1)]
        self.one = self.node("one", "x", *events, tier=tier)

    def node(self, name: str, host: str, *events: Event, tier: pb.TierStatus = ROOM, instance: int = 1) -> NodeMember:
        node, ops = self.master.directory.register(NodeInfo(name, instance, tcp=f"{host}:1"), (tier,), self.master.now_ns)
        self.master.commit(ops)
        self.master.sync(node, *events)
        return node

    def ordered(self, passed_ns: int, due: Callable[[int], list[CopyOrder]]) -> list[CopyOrder]:
        """Order the copies of `due` after some time, as the master does."""
        self.master.now_ns += passed_ns
        orders = due(self.master.now_ns)
        for tenant, keys, node_id, source in orders:
            self.master.directory.replication.plan(tenant, keys, node_id=node_id, source_node_id=source, now_ns=self.master.now_ns)
        self.master.directory.check_integrity()
        return orders

    def arrive(self, *orders: CopyOrder, has_room: bool = True) -> None:
        for order in orders:
            node = self.master.directory.members.get(order.node_id)
            assert node is not None
            generations = [1 + KEYS.index(key) for key in order.keys]
            message = CopyResult(node.epoch, order.tenant, order.keys, generations, bytes([has_room]) * len(order.keys))
            self.master.commit(self.master.directory.replication.enter(node.node_id, message).ops)

    def holders(self, key: bytes = b"a") -> list[int]:
        return sorted(self.master.directory.queries.lookup(TENANT, [key]).nodes)

    def gone(self, node: NodeMember, *keys: bytes) -> None:
        self.master.publish(node, *(Event(key, 1 + KEYS.index(key), EVENT_REMOVED) for key in keys))
