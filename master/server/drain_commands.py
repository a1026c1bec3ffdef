"""Execution of drains: commands to nodes, copy orders, and durable records. The loop is the only caller."""

import logging
from collections.abc import Callable

from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.server.node_frames import NodeFrames
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.protocol.catalog_messages import COPY_DRAIN, DRAIN_OFF, SetDraining
from kvstore.protocol.session_messages import Ok
from kvstore.telemetry.logs import named

log = logging.getLogger("kvstore.master")


class DrainCommands:
    """Executes the drains of placement/drains.py."""

    def __init__(self, owner: OwnerParts, nodes: NodeFrames) -> None:
        self._directory, self._committer, self._connections = owner.directory, owner.committer, owner.connections
        self._master_epoch = owner.master_epoch
        self._nodes = nodes
        self._over: set[int] = set()
        """Nodes whose completed drain was logged."""
        self._unacknowledged: dict[tuple[int, int, int], object] = {}
        """Unacknowledged commands by node, registration and mode; none is repeated meanwhile. A new object each
        time: the response to a cancelled drain must not count for a later one."""

    def drain(self, name: str, to: str, then: Callable[[], None]) -> None:
        """Drain the node to one of records.DRAINS, or cancel its drain (""). Call `then` when that is durable.
        Raises InvalidArgument."""
        drains = self._directory.drains
        self._committer.commit(drains.begin(name, to) if to else drains.cancel(name), then)
        node = self._directory.members.named(name)
        if node is None:
            return
        self._unacknowledged = {asked: which for asked, which in self._unacknowledged.items() if asked[0] != node.node_id}
        if not to:
            self._connections.notify(node.node_id, SetDraining(self._master_epoch, DRAIN_OFF), Ok, lambda _is_done: None)

    def run_due(self, now_ns: int) -> None:
        """Called ten times a second."""
        drains = self._directory.drains
        for node, mode in drains.unacknowledged():
            self._tell(node, mode)
        for tenant, keys, node_id, source_node_id in drains.step(now_ns):
            self._nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id, reason=COPY_DRAIN)
        self._log_completed()

    def _log_completed(self) -> None:
        """Log the end of each drain, and again after new blocks."""
        going = {node.node_id: node for node in self._directory.members.live() if node.drain}
        over = {
            node_id: progress.nvme_only_blocks
            for node_id, node in going.items()
            if (progress := self._directory.drains.progress(node)) is not None and progress.is_done
        }
        for node_id in over.keys() - self._over:
            name, kept = going[node_id].info.name, over[node_id]
            log.info(
                "node %s is drained: %d blocks return only with its disk", name, kept, extra=named("node_drained", node=name, kept=kept)
            )
        self._over = set(over)

    def _tell(self, node: NodeMember, mode: int) -> None:
        asked = node.node_id, node.epoch, mode
        if asked in self._unacknowledged or self._connections.get(node.node_id) is None:
            return
        which = self._unacknowledged[asked] = object()

        def answered(is_done: bool) -> None:
            if self._unacknowledged.get(asked) is which:
                del self._unacknowledged[asked]
                if is_done:
                    self._directory.drains.acknowledged(*asked)

        self._connections.notify(node.node_id, SetDraining(self._master_epoch, mode), Ok, answered)
