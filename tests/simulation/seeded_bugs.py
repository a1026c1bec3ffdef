"""Bugs put into the product on purpose, to show that the simulation finds each of them.

Every one is a step that the product takes and that is left out here. `BUGS` has them by name, each a context that lasts as long as the bug.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

from kvstore.master.catalogs.interface import Change, Op
from kvstore.master.directory.index.tenants import Tenant
from kvstore.master.directory.writes.removals import RemovedKeys
from kvstore.master.directory.writes.reservations import DirectoryReservations
from kvstore.master.server.node_frames import NodeFrames
from kvstore.protocol.catalog_messages import EVENT_REMOVED, Publish
from kvstore.rpc.tracing import TraceSpan
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.copies import BlockCopies
from kvstore.store.replication.event_replicator import EventReplicator, EventReplicators, Published
from kvstore.store.shared_index.index_writer import SharedIndexWriter
from kvstore.store.tiering.mover import TierMover
from kvstore.store.writes.commit_batcher import CommitBatcher
from tests.simulation.etcd import Etcd

Bug = Callable[[], AbstractContextManager[Any]]


@contextmanager
def acknowledged_before_published() -> Iterator[None]:
    """The node answers a put for the cluster without waiting until its event is durable at the master."""

    def when_published(self: EventReplicator, _newest: int, callback: Published, _span: TraceSpan | None = None, **_more: Any) -> None:
        callback(None)

    with patch.object(EventReplicator, "when_published", when_published):
        yield


@contextmanager
def told_to_the_first_master() -> Iterator[None]:
    """Seed a bug: nodes report blocks of every partition to the owner of partition 0."""

    def emit(self: EventReplicators, kind: int, block: Block) -> None:
        self[0].emit(kind, block)

    with patch.object(EventReplicators, "emit", emit):
        yield


@contextmanager
def claim_answered_before_durable() -> Iterator[None]:
    """The master answers a claim before the catalog has what it granted."""
    take_in = NodeFrames._take_in

    def at_once(self: NodeFrames, node_id: int, message: Publish, then: Callable[[], None]) -> None:
        take_in(self, node_id, message, lambda: None)
        then()

    with patch.object(NodeFrames, "_take_in", at_once):
        yield


@contextmanager
def generation_not_bumped() -> Iterator[None]:
    """Every put is granted the same generation."""
    take = DirectoryReservations._take

    def same(self: DirectoryReservations, count: int) -> range:
        former = self._last_generation
        granted = take(self, count)
        self._last_generation = former
        return granted

    with patch.object(DirectoryReservations, "_take", same), patch.object(DirectoryReservations, "saw", lambda self, generation: None):
        yield


@contextmanager
def epoch_not_compared() -> Iterator[None]:
    """etcd carries out what a former owner of the catalog sent and what comes late."""

    def write(self: Etcd, epoch: int, fence: int, changes: Sequence[Change]) -> None:
        self.carry_out(epoch, changes)

    with patch.object(Etcd, "write", write):
        yield


@contextmanager
def removal_forgotten() -> Iterator[None]:
    """A removal is not kept for the nodes that are away."""

    def remember(self: RemovedKeys, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        return []

    with patch.object(RemovedKeys, "remember", remember):
        yield


@contextmanager
def eviction_not_told() -> Iterator[None]:
    """The master hears nothing of blocks that have left."""
    emit = EventReplicator.emit

    def quiet(self: EventReplicator, kind: int, block: Block) -> None:
        if kind != EVENT_REMOVED:
            emit(self, kind, block)

    with patch.object(EventReplicator, "emit", quiet):
        yield


@contextmanager
def slot_reused_while_shown() -> Iterator[None]:
    """A block's entry in the shared index stays when its slot becomes another's."""
    with (
        patch.object(SharedIndexWriter, "remove", lambda self, block: None),
        patch.object(SharedIndexWriter, "remove_all", lambda self, blocks: None),
    ):
        yield


@contextmanager
def decision_ignored() -> Iterator[None]:
    """A block that the master has decided against stays."""
    settle = CommitBatcher._settle

    def keep(self: CommitBatcher, blocks: list[Block], reply: Any) -> None:
        with patch.object(BlockCopies, "drop", lambda self, block: None):
            settle(self, blocks, reply)

    with patch.object(CommitBatcher, "_settle", keep):
        yield


@contextmanager
def removal_overtakes_a_move() -> Iterator[None]:
    """A node answers a removal while another thread still writes the block to its disk."""
    with patch.object(TierMover, "flush_after_moves", TierMover.flush):
        yield


BUGS: Final[dict[str, Bug]] = {
    bug.__name__: bug
    for bug in (
        acknowledged_before_published,
        told_to_the_first_master,
        claim_answered_before_durable,
        generation_not_bumped,
        epoch_not_compared,
        removal_forgotten,
        eviction_not_told,
        slot_reused_while_shown,
        decision_ignored,
        removal_overtakes_a_move,
    )
}
