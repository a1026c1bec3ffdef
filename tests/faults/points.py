"""The fail points of each role: every step of put, get, publish, demote, promote, remove, replicate, take-over and drain at which a process
may end, by name ROLE.OPERATION.STEP.

A message has two points: before and after it is served. Other points stand between a change of bytes, its entry in the shared-memory index
and its report to another process.
"""

from collections.abc import Callable, Iterator
from typing import Final

from kvstore.protocol.catalog_messages import CommitBlocks, CopyBlocks, CopyResult, DeleteBlocks, Publish, SetDraining
from kvstore.protocol.master_messages import Locations, Lookup, MatchPrefix, Nodes, Remove, Replicate, Reserve, ReserveReply
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import (
    CommitPuts,
    MapSlabs,
    OpenIndex,
    OpenSlots,
    OpenSlotsReply,
    Put,
    ReadBlocks,
    ReadBlocksReply,
    ReleaseLeases,
    WaitCommitted,
)
from kvstore.protocol.session_messages import Flags
from tests.faults.fail_points import Point

_SESSION: Final = "kvstore.rpc.server.session:Session"
"""Of a daemon, either role's: the services' own functions are known to each session since before a point is armed."""


def _header_is(kind: type[Message]) -> Callable[..., bool]:
    return lambda _session, header, _body: header.type == kind.TYPE


def _message_is(kind: type[Message]) -> Callable[..., bool]:
    return lambda _channel, message, *_rest: message.TYPE == kind.TYPE


def _answer_is(kind: type[Message]) -> Callable[..., bool]:
    return lambda _channel, _frame, answer: answer is kind


def _around(name: str, target: str, where: Callable[..., bool] | None = None) -> Iterator[tuple[str, Point]]:
    yield f"{name}.before", Point(target, where=where)
    yield f"{name}.after", Point(target, is_after=True, where=where)


def _served(role: str, operation: str, *kinds: type[Message]) -> Iterator[tuple[str, Point]]:
    for kind in kinds:
        yield from _around(f"{role}.{operation}.{kind.__name__}", f"{_SESSION}._dispatch", _header_is(kind))


def _node() -> Iterator[tuple[str, Point]]:
    yield from _around("node.put.Put", f"{_SESSION}._begin_payload")
    yield from _served("node", "put", OpenSlots, CommitPuts, WaitCommitted)
    yield from _served("node", "get", ReadBlocks, ReleaseLeases, MapSlabs, OpenIndex)
    yield from _served("node", "remove", DeleteBlocks)
    yield from _served("node", "replicate", CopyBlocks)
    yield from _served("node", "drain", SetDraining)
    functions = {
        "put.shown": "store.shared_index.index_writer:SharedIndexWriter.add",
        "put.claim": "store.writes.commit_batcher:CommitBatcher._send",
        "put.decided": "store.writes.commit_batcher:CommitBatcher._settle",
        "publish.say": "store.replication.event_replicator:EventReplicator._send_message",
        "publish.answered": "store.replication.event_replicator:EventReplicator._advance",
        "publish.inventory": "store.replication.event_replicator:EventReplicator._send_inventory_part",
        "publish.register": "store.master_session.master_link:MasterLink._register",
        "demote.planned": "store.tiering.mover:TierMover._start",
        "demote.copy": "store.tiering.mover:TierMover._copy",
        "demote.write": "tiers.nvme:NvmeTier.write_batch",
        "demote.values": "tiers.value_store:ValueStore.write",
        "demote.transaction": "tiers.nvme_env:Environment._apply_or_abort",
        "demote.done": "store.tiering.mover:TierMover._finish",
        "promote.fetch": "store.reads.read_service:ReadService._fetch",
        "promote.read": "tiers.nvme:NvmeTier.read_batch_into",
        "promote.arrived": "store.reads.read_service:ReadService._arrived",
        "get.answer": "store.reads.read_service:ReadService._reply",
        "evict.hide": "store.shared_index.index_writer:SharedIndexWriter.remove",
        "remove.flush": "tiers.nvme:NvmeTier.flush",
        "replicate.fetch": "store.replication.replica_queue:ReplicaQueue._work",
        "replicate.arrived": "store.replication.replica_queue:ReplicaQueue._sort_out",
        "replicate.report": "store.replication.replica_queue:ReplicaQueue._report",
        "replicate.shown": "store.replication.replica_queue:ReplicaQueue._settle",
        "drain.mode": "store.tiering.drainer:Drainer.drain",
        "drain.save": "store.tiering.drainer:NvmeSaver.begin",
    }
    for name, function in functions.items():
        yield from _around(f"node.{name}", f"kvstore.{function}")


def _master() -> Iterator[tuple[str, Point]]:
    yield from _served("master", "put", Reserve, CommitBlocks, Nodes)
    yield from _served("master", "publish", Publish)
    yield from _served("master", "get", Lookup, MatchPrefix)
    yield from _served("master", "remove", Remove)
    yield from _served("master", "replicate", Replicate, CopyResult)
    functions = {
        "publish.commit": "master.catalogs.group_commit:GroupCommit._commit",
        "publish.durable": "master.catalogs.group_commit:Committer._committed",
        "publish.merge": "master.catalogs.segments.merger:SegmentMerger.step",
        "remove.planned": "master.directory.writes.removals:BlockRemover.plan",
        "remove.dropped": "master.directory.writes.removals:BlockRemover.dropped",
        "replicate.order": "master.server.node_frames:NodeFrames.replicate",
        "replicate.enter": "master.directory.placement.replication:ReplicaPlanner.enter",
        "register": "master.leadership.leader:LeaderRole.register",
        "drain.begun": "master.server.drain_commands:DrainCommands.drain",
        "drain.told": "master.server.drain_commands:DrainCommands._tell",
        "takeover.listed": "master.leadership.role_manager:RoleManager.take",
        "takeover.elected": "master.leadership.role_manager:RoleManager.elected",
        "takeover.begin": "master.leadership.leader:LeaderRole.begin",
    }
    for name, function in functions.items():
        yield from _around(f"master.{name}", f"kvstore.{function}")


def _client() -> Iterator[tuple[str, Point]]:
    channel = "kvstore.rpc.client.channel:Channel"
    asked: dict[str, tuple[type[Message], ...]] = {
        "put": (Put, OpenSlots, CommitPuts, WaitCommitted, Reserve),
        "get": (ReadBlocks, Lookup),
        "remove": (Remove,),
        "replicate": (Replicate,),
    }
    for operation, kinds in asked.items():
        for kind in kinds:
            yield from _around(f"client.{operation}.{kind.__name__}", f"{channel}._send", _message_is(kind))
    answered: dict[str, tuple[type[Message], ...]] = {"put": (OpenSlotsReply, ReserveReply, Flags), "get": (ReadBlocksReply, Locations)}
    for operation, kinds in answered.items():
        for kind in kinds:
            yield from _around(f"client.{operation}.{kind.__name__}", f"{channel}._answered", _answer_is(kind))
    yield from _around("client.get.look", "kvstore.client.local.reader_slots:LocalReaderSlots.acquire_hazard")
    yield from _around("client.get.copy", "kvstore.client.local.reads:LocalReads._copy")


POINTS: Final[dict[str, Point]] = dict((*_node(), *_master(), *_client()))


def of(role: str, *operations: str) -> list[str]:
    """The points of a role, of these operations or of all."""
    starts = tuple(f"{role}.{operation}." for operation in operations) or (f"{role}.",)
    return [name for name in POINTS if name.startswith(starts)]
