"""Tables of the cluster's status. Pure functions from a StatusReply to rich renderables."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.tables import bar, duration, names_shown, new_table, percent
from kvstore.console.model import shares
from kvstore.console.moves import home_copies_by_node, moves, skipped
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.settings import format_size
from kvstore.telemetry.http.listener import url_of

_STATE_STYLES: Final = {"alive": "green", "syncing": "yellow", "stopped": "dim", "dead": "red"}

OCCUPANCY_WIDTH: Final = 6
"""Of the bar in the table of tiers: it leaves the figures their place on 80 columns."""

NOT_SHOWN: Final = "sizes, counts and rates are for operators only: give a token of [admins], or of role admin (docs/security.md)"


def is_whole(status: pb.StatusReply) -> bool:
    """Return whether the status is complete. Callers that are not operators get neither the catalog's address nor the nodes' tiers."""
    return bool(status.catalog) or any(node.tiers for node in status.nodes)


def status_lines(status: pb.StatusReply, here: str = "", masters: Sequence[str] = ()) -> RenderableType:
    """Return a summary of the cluster. `here`: line on shared memory with nodes of this host, "" to omit; `masters`: a line per master."""
    health = status.catalog_health if status.catalog_health in ("", "ok") else "unhealthy"
    table = Table.grid(padding=(0, 2))
    table.add_row("master", f"version {status.version}, epoch {status.epoch}, up {duration(status.uptime_s)}")
    if masters:
        table.add_row("masters", Text("\n".join(masters)))
    table.add_row("catalog", Text.assemble(status.catalog, " ", (health or "unknown", "green" if health == "ok" else "red")))
    if is_whole(status):
        table.add_row("memory", f"{format_size(status.rss_bytes)} in the master")
        table.add_row("blocks", f"{status.blocks:,} published, {status.reserved:,} being written, {status.pinned:,} pinned")
        table.add_row("transfer", _transfer_line(status))
    else:
        table.add_row("not shown", NOT_SHOWN)
    if measured := _measured_line(status):
        table.add_row("measured", measured)
    if here:
        table.add_row("shared here", here)
    if encoded := _encoded_line(status):
        table.add_row("quantised", encoded)
    if is_whole(status):
        table.add_row("huge pages", huge_pages_line(status))
    if status.partitions > 1:
        table.add_row("partitions", _partitions_line(status))
    if status.http:
        table.add_row("console", f"{url_of(status.http)}/")
    local, remote = (sum(node.counters.get(name, 0) for node in status.nodes) for name in ("local_reads", "remote_reads"))
    if remote:
        table.add_row("local hits", f"{percent(local, local + remote)} of {local + remote:,} blocks were read on the reader's host")
    for name, line in (("home copies", _home_copies_line(status)), ("moved", _moved_line(status)), ("evicted", _evicted_line(status))):
        if line:
            table.add_row(name, line)
    if copies := status.counters.get("hot_copies", 0):
        size = format_size(status.counters["hot_copied_bytes"])
        table.add_row("hot", f"{status.counters['hot_blocks']:,} blocks, {copies:,} copies made of such, {size}")
    if drained := [node.name for node in _by_name(status) if node.HasField("drain")]:
        table.add_row("drained", ", ".join(drained))
    table.add_row("nodes", _nodes_line(status))
    return table


def _nodes_line(status: pb.StatusReply) -> Text:
    """Number of live nodes, and the names of the others by state."""
    others: dict[str, list[str]] = {}
    for node in _by_name(status):
        if node.state != "alive":
            others.setdefault(node.state, []).append(node.name)
    alive = len(status.nodes) - sum(map(len, others.values()))
    named = "".join(f"; {state}: {names_shown(names)}" for state, names in sorted(others.items()))
    style = "red" if "dead" in others or not alive else "yellow" if "syncing" in others else "green"
    return Text(f"{alive} of {len(status.nodes)} alive{named}", style=style)


def _partitions_line(status: pb.StatusReply) -> str:
    """Number of partitions of each master, and of those without an owner."""
    owned = [f"{name} {count}" for name, count in shares(status).items()]
    lost = sum(not owner.name for owner in status.owners)
    return f"{status.partitions} of the key space: {', '.join([*owned, *[f'{lost} without an owner'] * bool(lost)]) or 'owners unknown'}"


def _home_copies_line(status: pb.StatusReply) -> str:
    """Blocks copied to their home node, from and to which nodes, and those that were not copied; "" without any."""
    copies, not_made = status.counters.get("home_copies", 0), skipped(status.counters)
    found = []
    if copies:
        found.append(f"{copies:,} blocks, {format_size(status.counters['home_copied_bytes'])}, from nodes that were nearly full")
    for word, name in (("from", "sent"), ("to", "received")):
        if named := [f"{node} {blocks:,}" for node, blocks in home_copies_by_node(status, name)]:
            found.append(f"{word} {names_shown(named)}")
    if not_made:
        reasons = ", ".join(f"{blocks:,} {text}" for text, blocks in not_made.items())
        found.append(f"{sum(not_made.values()):,} not copied: {reasons}")
    return "; ".join(found)


def _moved_line(status: pb.StatusReply) -> str:
    """Blocks copied between nodes and tiers, by reason, without home copies."""
    found = [one for one in moves(status) if one.blocks and not one.counter.startswith("evicted_") and one.counter != "copied_blocks_home"]
    return ", ".join(f"{one.blocks:,} {one.text}" for one in found)


def _evicted_line(status: pb.StatusReply) -> str:
    """Blocks evicted from nodes, by reason."""
    found = [one for one in moves(status) if one.blocks and one.counter.startswith("evicted_")]
    reasons = ", ".join(f"{one.blocks:,} {one.text.removeprefix('evicted, ')}" for one in found)
    return f"{sum(one.blocks for one in found):,} blocks: {reasons}" if found else ""


def _transfer_line(status: pb.StatusReply) -> str:
    """Transports between hosts, bytes moved by the transfer engines, and their connections."""
    reach = Counter(transport.split()[0] for node in status.nodes for transport in dict.fromkeys(node.transports))
    rails = ", ".join(f"{name} on {count} rail{'s' * (count > 1)}" for name, count in sorted(reach.items()))
    moved = sum(node.counters.get("engine_bytes", 0) for node in status.nodes)
    peers = sum(node.counters.get("engine_connections", 0) for node in status.nodes)
    return f"shared memory within a host; between hosts {rails or 'by message'}: {format_size(moved)} moved, {peers} connections"


def _measured_line(status: pb.StatusReply) -> str:
    """Number of node pairs with recently measured rates, and the slowest; "" without any."""
    names = {node.node_id: node.name for node in status.nodes}
    found = [(rate, node.name) for node in status.nodes for rate in node.rates]
    if not found:
        return ""
    slowest, receiver = min(found, key=lambda one: one[0].bytes_per_s)
    pair = f"{names.get(slowest.node_id, f'node {slowest.node_id}')} to {receiver} at {format_size(int(slowest.bytes_per_s))}/s"
    return f"{len(found)} path{'s' * (len(found) > 1)} between nodes, the slowest {pair}"


def huge_pages_line(status: pb.StatusReply) -> str:
    """DRAM of all nodes in huge pages, and the reasons where none are available."""
    tiers = [tier for node in status.nodes for tier in node.tiers if tier.name == "dram"]
    sizes = (format_size(sum(tier.huge_bytes for tier in tiers)), format_size(sum(tier.capacity_bytes for tier in tiers)))
    reasons = sorted(Counter(tier.not_huge_reason for tier in tiers if tier.not_huge_reason).items())
    text = ", ".join(f"{reason} ({count} node{'s' * (count > 1)})" for reason, count in reasons)
    return f"{sizes[0]} of {sizes[1]} of DRAM" + (f"; {text}: run kvstore doctor there" if text else "")


def _encoded_line(status: pb.StatusReply) -> str:
    """Encoded bytes of all tiers; "" if no node has a codec or encoded values."""
    tiers = [tier for node in status.nodes for tier in node.tiers if _has_codec(tier)]
    if not tiers:
        return ""
    names = ", ".join(sorted({tier.codec for tier in tiers if tier.codec})) or "no current codec"
    stored = sum(_encoded_bytes(tier) for tier in tiers)
    decoded = stored + sum(tier.logical_bytes - tier.used_bytes for tier in tiers)
    bits = _shown(effective_bits(stored, sum(tier.elements for tier in tiers)))
    return f"{names}: {format_size(stored)} for {format_size(decoded)} of values, {bits} bits an element"


def nodes_table(status: pb.StatusReply) -> RenderableType:
    """Return a table with one row per node, by name."""
    columns = ("node", "id", "state", "address", "transfer", "blocks", "block table", "tiers", "heartbeat")
    table = new_table(*columns, right=("id", "blocks", "block table", "heartbeat"), caption=None if is_whole(status) else NOT_SHOWN)
    for node in _by_name(status):
        tiers = ", ".join(f"{tier.name} {format_size(tier.capacity_bytes)}" for tier in node.tiers)
        table.add_row(
            node.name,
            str(node.node_id),
            Text(_state(node), style=_STATE_STYLES.get(node.state, "red")),
            node.tcp or node.unix,
            ", ".join(node.transports) or "-",
            _blocks(node),
            _block_table(node),
            tiers,
            _heartbeat(node),
        )
    return table


def _state(node: pb.NodeStatus) -> str:
    if not node.HasField("drain"):
        return node.state
    return f"{node.state}, drained" if node.drain.is_done else f"{node.state}, draining: {node.drain.remaining_blocks:,} left"


def _heartbeat(node: pb.NodeStatus) -> str:
    """Age of the last heartbeat. A node that is not alive with age 0 is known from the catalog only."""
    is_from_catalog = node.state != "alive" and not node.heartbeat_age_s
    return "none since this master started" if is_from_catalog else f"{node.heartbeat_age_s:.1f} s ago"


def _blocks(node: pb.NodeStatus) -> str:
    """Committed blocks, and those not committed to the directory yet."""
    uncommitted = node.counters.get("undecided", 0)
    return f"{node.blocks:,} + {uncommitted:,} uncommitted" if uncommitted else f"{node.blocks:,}"


def _block_table(node: pb.NodeStatus) -> str:
    """Memory of the node's block table, and its limit."""
    limit_bytes = node.counters.get("max_table_bytes", 0)
    return f"{format_size(node.counters['table_bytes'])} of {format_size(limit_bytes)}" if limit_bytes else "-"


def tiers_table(status: pb.StatusReply) -> RenderableType:
    """Return a table with one row per tier of a node: occupancy, hit ratio, evictions.

    The hit ratio is the tier's share of all requested blocks, so the column sums to the cluster's hit ratio. "unread for" is the time
    between the last read of a block that was evicted lately and its eviction. "evicts next" is the next victim: how long it has not been
    read, and its value by the policy. On a narrow terminal all cells fold: columns without wrapping would take the place of the names.
    """
    figures = ("used", "of", "blocks", "hit ratio", "evicted", "unread for", "evicts next")
    caption = None if is_whole(status) else NOT_SHOWN
    table = new_table("node", "tier", "full", *figures, right=figures, caption=caption)
    unhealthy: list[str] = []
    absent: list[str] = []
    reads = _reads(status)
    for node in _by_name(status):
        for tier in node.tiers:
            table.add_row(
                node.name,
                _tier_name(tier),
                bar(tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0, OCCUPANCY_WIDTH),
                format_size(tier.used_bytes),
                format_size(tier.capacity_bytes),
                f"{tier.blocks:,}",
                percent(tier.hits, reads),
                f"{tier.evictions:,}",
                duration(tier.evicted_age_s) if tier.evictions else "-",
                next_victim_text(tier),
            )
            if tier.health != "ok":
                unhealthy.append(f"{tier.name} of {node.name}: {tier.health}")
        if node.state in NOT_RUNNING:
            absent.append(f"{node.name} is {node.state}; its tiers are as last reported")
        elif not any(tier.name == "hbm" for tier in node.tiers):
            absent.append(f"{node.name} has no HBM tier")
    encoded = [Text(), encoded_table(status)] if any(_has_codec(tier) for node in status.nodes for tier in node.tiers) else []
    return Group(table, *encoded, *(Text(text, style="red") for text in unhealthy), *(Text(text, style="dim") for text in absent))


def next_victim_text(tier: pb.TierStatus) -> str:
    """Return what the tier would evict next: age, and why it is first or its value; a dash if unknown."""
    if not tier.HasField("next_victim"):
        return "-"
    found = tier.next_victim
    more = found.reason
    if found.HasField("hits_per_byte_s"):
        more = f"{found.hits_per_byte_s * (1 << 30):.3g} hits/s a GiB"
    return f"{duration(found.unread_s)}{', ' * bool(more)}{more}"


def encoded_table(status: pb.StatusReply) -> RenderableType:
    """Return a table with one row per tier that has a codec or encoded values: decoded size, encoded size, bits per element."""
    figures = ("worth", "encoded", "payload", "metadata", "bits an element")
    table = new_table("node", "tier", "codec", *figures, right=figures)
    for node in _by_name(status):
        for tier in filter(_has_codec, node.tiers):
            stored = _encoded_bytes(tier)
            sizes = (tier.logical_bytes, stored, tier.payload_bytes, tier.metadata_bytes)
            table.add_row(node.name, tier.name, tier.codec or "-", *map(format_size, sizes), _shown(effective_bits(stored, tier.elements)))
    return table


def effective_bits(stored_bytes: int, elements: int) -> float | None:
    """Return bits per element, metadata included; None without elements."""
    return 8 * stored_bytes / elements if elements else None


def _by_name(status: pb.StatusReply) -> list[pb.NodeStatus]:
    return sorted(status.nodes, key=lambda node: node.name)


def _reads(status: pb.StatusReply) -> int:
    """Requested blocks: hits, misses at nodes, and lookups that the master did not find."""
    at_nodes = sum(sum(tier.hits for tier in node.tiers) + node.counters.get("misses", 0) for node in status.nodes)
    return int(at_nodes + status.counters.get("lookup_misses", 0))


def _shown(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.2f}"


def _has_codec(tier: pb.TierStatus) -> bool:
    return bool(tier.codec or tier.elements)


def _encoded_bytes(tier: pb.TierStatus) -> int:
    return tier.payload_bytes + tier.metadata_bytes


def _tier_name(tier: pb.TierStatus) -> Text:
    return Text(tier.name, style="" if tier.health == "ok" else "red")
