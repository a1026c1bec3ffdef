"""How a batch of copies becomes a transfer: checked, its memory held, cut into slices, and handed to the carrier."""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.pieces import regions_here, total_bytes
from kvstore.transfer.memory.region import Region
from kvstore.transfer.memory.signal_safety import Gate
from kvstore.transfer.paths.carrier import Carrier
from kvstore.transfer.paths.peer import Peer
from kvstore.transfer.paths.slices import cut
from kvstore.transfer.paths.spans import Batch, Group, groups_of
from kvstore.transfer.paths.transfers import Priority, Slice, Transfer


def begin_transfer(
    batch: Batch,
    carrier: Carrier,
    owner: object,
    *,
    deadline: Deadline,
    priority: Priority,
    on_done: Callable[[Transfer], None] | None = None,
    waits: bool = False,
    gate: Gate | None = None,
) -> Transfer:
    """The transfer, which is under way or over. `owner` is who may use the peers, `waits` says that the caller calls `wait` next, and
    `gate` is entered until it is over.

    Raises InvalidArgument, Closed (a region, or the carrier) or Unreachable: nothing is begun then, and nothing held.
    """
    groups = groups_of(batch)
    for peer, _, _ in groups:
        if peer.owner is not owner:
            raise InvalidArgument("a region of a peer is used by the engine that imported it, not by another one")
    regions = _hold(_used_in(groups))
    transfer = Transfer(deadline, priority, regions, carrier.abort, carrier.help, on_done)
    parts: dict[Peer, list[Slice]] = {}
    for peer, direction, pieces in groups:
        for cut_pieces in cut(pieces, peer.slice_bytes):
            part = Slice(transfer, peer, direction, cut_pieces, total_bytes(cut_pieces))
            parts.setdefault(peer, []).append(part)
            transfer.size_bytes += part.size_bytes
            transfer.slices_left += 1
    if gate is not None:
        transfer.stays_in(gate)
    try:
        carrier.begin(parts, transfer if waits else None)
    except KVStoreError:
        if gate is not None:
            gate.leave()
        for region in regions:
            region.release()
        raise
    if not parts:
        transfer.complete()
    return transfer


def _used_in(groups: Sequence[Group]) -> Collection[Region]:
    """Each region of this process that a batch uses, once."""
    if len(groups) == 1:
        return regions_here(groups[0][2])
    return {id(region): region for _, _, pieces in groups for region in regions_here(pieces)}.values()


def _hold(regions: Collection[Region]) -> Collection[Region]:
    """Hold all or none. Raises Closed."""
    for number, region in enumerate(regions):
        try:
            region.hold()
        except Closed:
            for held in islice(regions, number):
                held.release()
            raise
    return regions
