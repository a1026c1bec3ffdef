"""Drains carried out: nodes are told, copies ordered, and what operators say made durable. The loop is the only caller."""

import logging
from collections.abc import Callable

from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.server.node_frames import NodeFrames
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.protocol.catalog_messages import DRAIN_OFF, SetDraining
from kvstore.protocol.session_messages import Ok
from kvstore.telemetry.logs import named

log = logging.getLogger("kvstore.master")


class DrainCommands:
    """See the module; what is drained, and how far, is placement/drains.py."""

    def __init__(self, owner: OwnerParts, nodes: NodeFrames) -> None:
        self._directory, self._committer, self._links = owner.directory, owner.committer, owner.links
        self._master_epoch = owner.master_epoch
        self._nodes = nodes
        self._over: set[int] = set()
        """Nodes of whose drain the log was told that it is over."""
        self._asked: dict[tuple[int, int, int], object] = {}
        """Node, registration and mode of what has been said and not been answered: it is not said again meanwhile. Each time another
        object: the answer to what an operator has taken back since is none to what is said after that."""

    def drain(self, name: str, to: str, then: Callable[[], None]) -> None:
        """Have the node drained, to one of records.DRAINS, or no more (""); `then` when that is durable. Raises InvalidArgument."""
        draining = self._directory.draining
        self._committer.commit(draining.begin(name, to) if to else draining.cancel(name), then)
        node = self._directory.members.named(name)
        if node is None:
            return
        self._asked = {asked: which for asked, which in self._asked.items() if asked[0] != node.node_id}
        if not to:
            self._links.say(node.node_id, SetDraining(self._master_epoch, DRAIN_OFF), Ok, lambda _is_done: None)

    def tick(self, now_ns: int) -> None:
        """Called ten times a second."""
        draining = self._directory.draining
        for node, mode in draining.to_tell():
            self._tell(node, mode)
        for tenant, keys, node_id, source_node_id in draining.step(now_ns):
            self._nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id)
        self._tell_ends()

    def _tell_ends(self) -> None:
        """In the log, once a drain, and again once something has come after all."""
        going = {node.node_id: node for node in self._directory.members.live() if node.drain}
        over = {
            node_id: progress.nvme_only_blocks
            for node_id, node in going.items()
            if (progress := self._directory.draining.progress(node)) is not None and progress.is_done
        }
        for node_id in over.keys() - self._over:
            name, kept = going[node_id].info.name, over[node_id]
            log.info(
                "node %s is drained: %d blocks come back with its disk only", name, kept, extra=named("node_drained", node=name, kept=kept)
            )
        self._over = set(over)

    def _tell(self, node: NodeMember, mode: int) -> None:
        asked = node.node_id, node.epoch, mode
        if asked in self._asked or self._links.get(node.node_id) is None:
            return
        which = self._asked[asked] = object()

        def answered(is_done: bool) -> None:
            if self._asked.get(asked) is which:
                del self._asked[asked]
                if is_done:
                    self._directory.draining.told(*asked)

        self._links.say(node.node_id, SetDraining(self._master_epoch, mode), Ok, answered)
