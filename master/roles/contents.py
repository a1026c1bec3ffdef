"""What the directory holds, told in a message: copied in the loop a slice at a time, looked at in the caller's thread."""

from collections.abc import Callable
from typing import Any, Final, Protocol

from kvstore.master.directory.contents import copied
from kvstore.master.directory.segments import segments
from kvstore.master.directory.usage import Held, usage
from kvstore.master.roles.leading import Leading
from kvstore.protocol import control_pb2 as pb

SLICE_ROWS: Final = 32_768
"""Rows copied in one turn of the loop: half a millisecond. Of sets of holders as many: three milliseconds where there are that many."""
MAX_NAMESPACES: Final = 1000
MAX_SEGMENTS: Final = 2000
"""A message of 200 kB."""


class InLoop(Protocol):
    """Has a function called in the loop's thread; its result."""

    def __call__(self, function: Callable[[], Any], /) -> Any: ...


def contents(in_loop: InLoop, answering: Callable[[], Leading], tenant: str | None, request: pb.ContentsRequest) -> pb.ContentsReply:
    """Of `tenant`, or of all of them (None) with the tree of the request's own. `answering` is called in the loop. Raises Unavailable."""
    directory = in_loop(lambda: answering().directory)
    slices = copied(*directory.columns(), slice_rows=SLICE_ROWS)
    columns = None
    while columns is None:
        columns = in_loop(lambda: next(slices))
    used = usage(columns, tenant, limit=MAX_NAMESPACES)
    limit = min(request.max_segments, MAX_SEGMENTS)
    found = segments(columns, request.tenant, request.namespace, limit=limit) if limit else []
    keys = in_loop(lambda: directory.keys_of([segment.row for segment in found]))
    return pb.ContentsReply(
        namespaces=[pb.NamespaceUsage(tenant=one.tenant, namespace=one.namespace, held=_held(one.held), pinned=one.pinned) for one in used],
        segments=[
            pb.PrefixSegment(parent=one.parent, key=key, held=_held(one.held), subtree_bytes=one.subtree_bytes, branches=one.branches)
            for one, key in zip(found, keys, strict=True)
        ],
    )


def _held(held: Held) -> pb.Held:
    hbm, dram, nvme, _unknown = held.tiers
    return pb.Held(blocks=held.blocks, bytes=held.size_bytes, hbm_bytes=hbm, dram_bytes=dram, nvme_bytes=nvme)
