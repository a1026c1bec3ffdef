"""Contents of the directory as a message: copied in the loop in slices, evaluated in the caller's thread."""

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.kvcache.explained import layout
from kvstore.kvcache.namespace import Namespace
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.index.contents import (
    LIVE,
    BlockUsage,
    ContentsColumns,
    Indexes,
    Reads,
    TierUsage,
    copied,
    joined,
    segments,
    usage,
)
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.directory.weights import KnownNamespace, WeightsTable, named
from kvstore.master.leadership.role_manager import RoleManager
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.partitions import split

SLICE_ROWS: Final = 32_768
"""Rows copied in one call into the loop: half a millisecond. As many holder sets: three milliseconds."""
SLICE_KEYS: Final = 4096
"""Keys looked up in one call into the loop."""
MAX_NAMESPACES: Final = 1000
MAX_USERS: Final = 8
"""Engines named with a namespace: with the longest texts 1,000 namespaces are 3 MiB."""
MAX_SEGMENTS: Final = 2000
"""A message of 200 kB."""


CallInLoop = Callable[[Callable[[], Any]], Any]
"""Calls a function in the loop's thread and returns its result."""


class PartitionContents(NamedTuple):
    """Tables of one partition at this master."""

    rows: Rows
    tenants: Tenants
    queries: DirectoryQueries


def contents(
    in_loop: CallInLoop,
    role_managers: Sequence[RoleManager],
    tenant: str | None,
    request: pb.ContentsRequest,
    *,
    now_ns: Callable[[], int],
) -> pb.ContentsReply:
    """Return usage of `tenant`, or of all (None), and the prefix tree of the request's tenant and namespace, over all
    partitions; those that others own from their records.

    `role_managers`, by partition, are read in the loop, where `now_ns` is called. Raises Unavailable."""
    directory, found = in_loop(lambda: _known(role_managers))
    parts = [_copied(in_loop, table) for table in found]
    columns, begins = (parts[0], [0]) if len(parts) == 1 else joined(parts, _links(in_loop, found, parts, request.tenant))
    used = usage(columns, tenant, limit=MAX_NAMESPACES)
    limit = min(request.max_segments, MAX_SEGMENTS)
    reads = _reads(in_loop, directory, found, begins, request.tenant, len(columns.sizes), now_ns) if limit and request.hottest else None
    chosen = segments(columns, request.tenant, request.namespace, limit=limit, reads=reads) if limit else []

    def key_at(row: int) -> bytes:
        at = bisect_right(begins, row) - 1
        key: bytes = found[at].rows.keys[row - begins[at]]
        return key

    keys = in_loop(lambda: [key_at(segment.row) for segment in chosen])
    return pb.ContentsReply(
        namespaces=_with_layouts(*in_loop(lambda: _namespaces(directory, used, tenant, now_ns()))),
        segments=[
            pb.PrefixSegment(
                parent=one.parent,
                key=key,
                stored=_stored(one.held),
                subtree_bytes=one.subtree_bytes,
                branches=one.branches,
                reads_per_s=one.reads_per_s,
                subtree_reads_per_s=one.subtree_reads_per_s,
            )
            for one, key in zip(chosen, keys, strict=True)
        ],
    )


def _known(role_managers: Sequence[RoleManager]) -> tuple[Directory, list[PartitionContents]]:
    directory = role_managers[0].readable_leader().directory
    live = [node.node_id for node in directory.members.live()] if len(role_managers) > 1 else []
    return directory, [PartitionContents(*role_manager.columns(live), role_manager.queries(live)) for role_manager in role_managers]


def _copied(in_loop: CallInLoop, table: PartitionContents) -> ContentsColumns:
    slices = copied(table.rows, table.tenants, slice_rows=SLICE_ROWS)
    columns: ContentsColumns | None = None
    while columns is None:
        columns = in_loop(lambda: next(slices))
    return columns


def _links(
    in_loop: CallInLoop, tables: Sequence[PartitionContents], parts: Sequence[ContentsColumns], tenant: str
) -> list[tuple[Indexes, Indexes]]:
    """Return, for each partition, the rows that stand for parents in other partitions, and the rows of these in the
    joined table."""
    begins = np.cumsum([0, *(len(part.sizes) for part in parts)])
    links = []
    for number, (table, part) in enumerate(zip(tables, parts, strict=True)):
        owners = [index for index, name in part.tenant_names.items() if name == tenant]
        parents = np.unique(part.parents)
        is_absent = (part.row_masks()[parents] & LIVE == 0) & np.isin(part.tenants[parents], owners) & (parents != NO_ROW)
        rows, others = parents[is_absent], parents[is_absent] + np.uint32(begins[number])
        for begin in range(0, len(rows), SLICE_KEYS):
            some = slice(begin, begin + SLICE_KEYS)
            others[some] = in_loop(functools.partial(_elsewhere, tables, table, tenant, rows[some], others[some], begins, parts))
        links.append((rows, others))
    return links


def _elsewhere(
    tables: Sequence[PartitionContents],
    table: PartitionContents,
    tenant: str,
    rows: Indexes,
    own: Indexes,
    begins: Any,
    parts: Sequence[ContentsColumns],
) -> Indexes:
    """Return the joined rows of the blocks that these rows stand for; their own for missing blocks."""
    found, keys = own.copy(), [table.rows.keys[row] for row in rows.tolist()]
    for number, places in split(keys, len(tables)).items():
        there = tables[number].queries.rows_of(tenant, [keys[at] for at in places])
        is_there = (there != NO_ROW) & (there < len(parts[number].sizes))
        at = np.array(places)[is_there]
        found[at] = there[is_there] + begins[number]
    return found


def _reads(
    in_loop: CallInLoop,
    directory: Directory,
    tables: Sequence[PartitionContents],
    begins: Sequence[int],
    tenant: str,
    count: int,
    now_ns: Callable[[], int],
) -> Reads:
    """Return reads a second by row, as nodes reported them, and request reports from now on. Rows after the `count`
    copied ones are left out."""

    def hot() -> dict[bytes, float]:
        directory.block_heat.request_reports(now_ns())
        return directory.block_heat.of(tenant, now_ns())

    reads_by_key = in_loop(hot)
    keys, rates = list(reads_by_key), np.fromiter(reads_by_key.values(), np.float64, len(reads_by_key))
    reads: Reads = np.zeros(count)
    ends = [*begins[1:], count]
    for begin in range(0, len(keys), SLICE_KEYS):
        part, rates_of_part = keys[begin : begin + SLICE_KEYS], rates[begin : begin + SLICE_KEYS]
        for number, places in split(part, len(tables)).items():
            rows = in_loop(functools.partial(tables[number].queries.rows_of, tenant, [part[at] for at in places]))
            is_copied = (rows != NO_ROW) & (rows < ends[number] - begins[number])
            np.add.at(reads, rows[is_copied] + begins[number], rates_of_part[places][is_copied])
    return reads


def _with_layouts(found: list[pb.NamespaceUsage], forms: list[bytes]) -> list[pb.NamespaceUsage]:
    """Fill in `layout`, outside of the loop: parsing a thousand forms takes tens of milliseconds."""
    for one, form in zip(found, forms, strict=True):
        one.layout = _layout(form) if form else ""
    return found


@functools.lru_cache(maxsize=4096)
def _layout(form: bytes) -> str:
    return layout(Namespace.from_canonical(form))


def _namespaces(
    directory: Directory, used: Sequence[BlockUsage], tenant: str | None, now_ns: int
) -> tuple[list[pb.NamespaceUsage], list[bytes]]:
    """Return the namespaces with blocks, then those without that engines use, with reports of engines and nodes.
    Beside each its canonical form, b"" if none was reported."""
    table = directory.weights
    found = [pb.NamespaceUsage(tenant=one.tenant, namespace=one.namespace, stored=_stored(one.held), pinned=one.pinned) for one in used]
    there = {(one.tenant, one.namespace) for one in used}
    for key, row in table.of(tenant):
        ids = sorted(row.namespaces) if row.users else []
        empty = ((key.weights.tenant, id.hex()) for id in ids)
        found += [pb.NamespaceUsage(tenant=owner, namespace=name) for owner, name in empty if (owner, name) not in there]
    del found[MAX_NAMESPACES:]
    forms = []
    for one in found:
        known = table.known(one.tenant, one.namespace)
        forms.append(known.form if known is not None else b"")
        _explain(one, known, table)
        age_s = directory.last_reads.age_s(one.tenant, one.namespace, now_ns)
        if age_s is not None:
            one.read_age_s = age_s
    return found, forms


def _explain(one: pb.NamespaceUsage, known: KnownNamespace | None, table: WeightsTable) -> None:
    """Fill in the namespace's identity and engines."""
    if known is not None:
        key = known.version
        row = table.rows[key]
        one.model, one.weights = known.model, named(key.weights.base, key.version)
        one.users.extend(row.last_users[:MAX_USERS])
        one.is_used, one.is_retired = bool(row.users), table.is_retired(key)


def _stored(held: TierUsage) -> pb.StorageUsage:
    hbm, dram, nvme, _unknown = held.tiers
    return pb.StorageUsage(blocks=held.blocks, bytes=held.size_bytes, hbm_bytes=hbm, dram_bytes=dram, nvme_bytes=nvme)
