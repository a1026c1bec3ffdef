"""What the directory holds, told in a message: copied in the loop a slice at a time, looked at in the caller's thread."""

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from kvstore.master.directory.contents import copied
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.segments import Reads, segments
from kvstore.master.directory.usage import Held, usage
from kvstore.master.roles.leading import Leading
from kvstore.protocol import control_pb2 as pb

SLICE_ROWS: Final = 32_768
"""Rows copied in one turn of the loop: half a millisecond. Of sets of holders as many: three milliseconds where there are that many."""
SLICE_KEYS: Final = 4096
"""Keys that are looked for in one turn."""
MAX_NAMESPACES: Final = 1000
MAX_SEGMENTS: Final = 2000
"""A message of 200 kB."""


class InLoop(Protocol):
    """Has a function called in the loop's thread; its result."""

    def __call__(self, function: Callable[[], Any], /) -> Any: ...


def contents(
    in_loop: InLoop, answering: Callable[[], Leading], tenant: str | None, request: pb.ContentsRequest, *, now_ns: Callable[[], int]
) -> pb.ContentsReply:
    """Of `tenant`, or of all of them (None) with the tree of the request's own. `answering` and `now_ns` are called in the loop. Raises
    Unavailable."""
    directory = in_loop(lambda: answering().directory)
    slices = copied(*directory.columns(), slice_rows=SLICE_ROWS)
    columns = None
    while columns is None:
        columns = in_loop(lambda: next(slices))
    used = usage(columns, tenant, limit=MAX_NAMESPACES)
    limit = min(request.max_segments, MAX_SEGMENTS)
    reads = _reads(in_loop, directory, request.tenant, len(columns.sizes), now_ns) if limit and request.hottest else None
    found = segments(columns, request.tenant, request.namespace, limit=limit, reads=reads) if limit else []
    keys = in_loop(lambda: directory.keys_of([segment.row for segment in found]))
    return pb.ContentsReply(
        namespaces=[pb.NamespaceUsage(tenant=one.tenant, namespace=one.namespace, held=_held(one.held), pinned=one.pinned) for one in used],
        segments=[
            pb.PrefixSegment(
                parent=one.parent,
                key=key,
                held=_held(one.held),
                subtree_bytes=one.subtree_bytes,
                branches=one.branches,
                reads_per_s=one.reads_per_s,
                subtree_reads_per_s=one.subtree_reads_per_s,
            )
            for one, key in zip(found, keys, strict=True)
        ],
    )


def _reads(in_loop: InLoop, directory: Directory, tenant: str, count: int, now_ns: Callable[[], int]) -> Reads:
    """Of each row, as far as nodes told; they are asked from now on. Rows that came after the `count` that were copied are left out."""

    def hot() -> dict[bytes, float]:
        directory.heat.want(now_ns())
        return directory.heat.of(tenant, now_ns())

    told = in_loop(hot)
    keys, rates = list(told), np.fromiter(told.values(), np.float64, len(told))
    reads: Reads = np.zeros(count)
    for begin in range(0, len(keys), SLICE_KEYS):
        part = keys[begin : begin + SLICE_KEYS]
        rows = in_loop(functools.partial(directory.queries.rows_of, tenant, part))
        is_copied = rows < count
        np.add.at(reads, rows[is_copied], rates[begin : begin + SLICE_KEYS][is_copied])
    reads[NO_ROW] = 0
    return reads


def _held(held: Held) -> pb.Held:
    hbm, dram, nvme, _unknown = held.tiers
    return pb.Held(blocks=held.blocks, bytes=held.size_bytes, hbm_bytes=hbm, dram_bytes=dram, nvme_bytes=nvme)
