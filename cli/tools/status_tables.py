"""The cluster's status for human eyes: rich tables and bars. Pure: from a StatusReply to something that rich prints."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.tables import bar, duration, names_shown, new_table, percent
from kvstore.console.model import shares
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.settings import format_size
from kvstore.telemetry.http.listener import url_of

_STATE_STYLES: Final = {"alive": "green", "syncing": "yellow", "stopped": "dim", "dead": "red"}


NOT_SHOWN: Final = "sizes, counts and rates are shown to operators: give a token of [admins], or of role admin (docs/security.md)"


def is_whole(status: pb.StatusReply) -> bool:
    """Does it tell all that there is? Who is no operator is told neither where the catalog is nor what nodes hold."""
    return bool(status.catalog) or any(node.tiers for node in status.nodes)


def status_lines(status: pb.StatusReply, here: str = "", masters: Sequence[str] = ()) -> RenderableType:
    """The cluster in a few lines, and `here`: with which nodes of this host memory is shared; "": not looked at. `masters`: a line each,
    where there are several."""
    health = status.catalog_health if status.catalog_health in ("", "ok") else "in trouble"
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
    if status.partitions > 1:  # whose masters serve no console
        table.add_row("partitions", _partitions_line(status))
    elif status.http:
        table.add_row("console", f"{url_of(status.http)}/")
    if spilled := status.counters.get("spilled_blocks", 0):
        table.add_row("spilled", f"{spilled:,} blocks, {format_size(status.counters['spilled_bytes'])}, from nodes that were nearly full")
    if copies := status.counters.get("hot_copies", 0):
        size = format_size(status.counters["hot_copied_bytes"])
        table.add_row("hot", f"{status.counters['hot_blocks']:,} blocks, {copies:,} copies made of such, {size}")
    if drained := [node.name for node in _by_name(status) if node.HasField("drain")]:
        table.add_row("drained", ", ".join(drained))
    table.add_row("nodes", _nodes_line(status))
    return table


def _nodes_line(status: pb.StatusReply) -> Text:
    """How many are alive, and the names of the others by their state."""
    others: dict[str, list[str]] = {}
    for node in _by_name(status):
        if node.state != "alive":
            others.setdefault(node.state, []).append(node.name)
    alive = len(status.nodes) - sum(map(len, others.values()))
    named = "".join(f"; {state}: {names_shown(names)}" for state, names in sorted(others.items()))
    style = "red" if "dead" in others or not alive else "yellow" if "syncing" in others else "green"
    return Text(f"{alive} of {len(status.nodes)} alive{named}", style=style)


def _partitions_line(status: pb.StatusReply) -> str:
    """How many each master owns, and how many nobody does."""
    owned = [f"{name} {count}" for name, count in shares(status).items()]
    lost = sum(not owner.name for owner in status.owners)
    return f"{status.partitions} of the key space: {', '.join([*owned, *[f'{lost} without an owner'] * bool(lost)]) or 'owners not told'}"


def _transfer_line(status: pb.StatusReply) -> str:
    """How values move: by which transports the nodes' engines are reached from other hosts, and what they moved."""
    reach = Counter(transport.split()[0] for node in status.nodes for transport in dict.fromkeys(node.transports))
    ways = ", ".join(f"{name} on {count} rail{'s' * (count > 1)}" for name, count in sorted(reach.items()))
    moved = sum(node.counters.get("engine_bytes", 0) for node in status.nodes)
    peers = sum(node.counters.get("engine_connections", 0) for node in status.nodes)
    return f"shared memory within a host; between hosts {ways or 'by message'}: {format_size(moved)} moved, {peers} connections"


def _measured_line(status: pb.StatusReply) -> str:
    """Between how many nodes rates were measured lately, and the slowest way; empty where none was."""
    names = {node.node_id: node.name for node in status.nodes}
    found = [(rate, node.name) for node in status.nodes for rate in node.rates]
    if not found:
        return ""
    slowest, receiver = min(found, key=lambda one: one[0].bytes_per_s)
    way = f"{names.get(slowest.node_id, f'node {slowest.node_id}')} to {receiver} at {format_size(int(slowest.bytes_per_s))}/s"
    return f"{len(found)} way{'s' * (len(found) > 1)} from node to node, the slowest {way}"


def huge_pages_line(status: pb.StatusReply) -> str:
    """How much of the DRAM of all nodes is in huge pages, and why the rest is not where there are none to be had."""
    tiers = [tier for node in status.nodes for tier in node.tiers if tier.name == "dram"]
    sizes = (format_size(sum(tier.huge_bytes for tier in tiers)), format_size(sum(tier.capacity_bytes for tier in tiers)))
    reasons = sorted(Counter(tier.not_huge_reason for tier in tiers if tier.not_huge_reason).items())
    told = ", ".join(f"{reason} ({count} node{'s' * (count > 1)})" for reason, count in reasons)
    return f"{sizes[0]} of {sizes[1]} of DRAM" + (f"; {told}: see kvstore doctor there" if told else "")


def _encoded_line(status: pb.StatusReply) -> str:
    """What all tiers together hold quantised; empty where no node has a codec or encoded values."""
    tiers = [tier for node in status.nodes for tier in node.tiers if _has_codec(tier)]
    if not tiers:
        return ""
    names = ", ".join(sorted({tier.codec for tier in tiers if tier.codec})) or "none any more"
    stored = sum(_encoded_bytes(tier) for tier in tiers)
    worth = stored + sum(tier.logical_bytes - tier.used_bytes for tier in tiers)
    bits = _shown(effective_bits(stored, sum(tier.elements for tier in tiers)))
    return f"{names}: {format_size(stored)} for {format_size(worth)} of values, {bits} bits an element"


def nodes_table(status: pb.StatusReply) -> RenderableType:
    """One row a node, by name."""
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
    """0 of a node that is not alive: this master has never heard of it but from the catalog."""
    is_unheard = node.state != "alive" and not node.heartbeat_age_s
    return "not since this master began" if is_unheard else f"{node.heartbeat_age_s:.1f} s ago"


def _blocks(node: pb.NodeStatus) -> str:
    """Those that the master knows, and those that it has not decided about."""
    undecided = node.counters.get("undecided", 0)
    return f"{node.blocks:,} + {undecided:,} undecided" if undecided else f"{node.blocks:,}"


def _block_table(node: pb.NodeStatus) -> str:
    """Memory beside the tiers for what the node knows of blocks, and how much it may be."""
    limit_bytes = node.counters.get("max_table_bytes", 0)
    return f"{format_size(node.counters['table_bytes'])} of {format_size(limit_bytes)}" if limit_bytes else "-"


def tiers_table(status: pb.StatusReply) -> RenderableType:
    """One row a tier of a node: how full it is, its share of all blocks that were asked for (so the column sums to the cluster's hit
    ratio), what had to leave."""
    figures = ("used", "of", "blocks", "hit ratio", "evicted")
    caption = None if is_whole(status) else NOT_SHOWN
    table = new_table("node", "tier", "occupancy", *figures, right=figures, no_wrap=("occupancy", *figures), caption=caption)
    absent: list[str] = []
    reads = _reads(status)
    for node in _by_name(status):
        for tier in node.tiers:
            table.add_row(
                node.name,
                _tier_name(tier),
                bar(tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0),
                format_size(tier.used_bytes),
                format_size(tier.capacity_bytes),
                f"{tier.blocks:,}",
                percent(tier.hits, reads),
                f"{tier.evictions:,}",
            )
        if node.state in NOT_RUNNING:
            absent.append(f"{node.name} is {node.state}; its tiers are as it last said")
        elif not any(tier.name == "hbm" for tier in node.tiers):
            absent.append(f"{node.name} has no HBM tier")
    if any(_has_codec(tier) for node in status.nodes for tier in node.tiers):
        return Group(table, Text(), encoded_table(status), *(Text(text, style="dim") for text in absent))
    return Group(table, *(Text(text, style="dim") for text in absent))


def encoded_table(status: pb.StatusReply) -> RenderableType:
    """One row a tier with a codec or with values that were encoded by one: what all that it holds is worth to readers, what the encoded
    values take, and how many bits an element of theirs comes to."""
    figures = ("worth", "encoded", "payload", "metadata", "bits an element")
    table = new_table("node", "tier", "codec", *figures, right=figures, no_wrap=("tier", "codec", *figures))
    for node in _by_name(status):
        for tier in filter(_has_codec, node.tiers):
            stored = _encoded_bytes(tier)
            sizes = (tier.logical_bytes, stored, tier.payload_bytes, tier.metadata_bytes)
            table.add_row(node.name, tier.name, tier.codec or "-", *map(format_size, sizes), _shown(effective_bits(stored, tier.elements)))
    return table


def effective_bits(stored_bytes: int, elements: int) -> float | None:
    """Bits that an element takes, metadata included; None where there is no element."""
    return 8 * stored_bytes / elements if elements else None


def _by_name(status: pb.StatusReply) -> list[pb.NodeStatus]:
    return sorted(status.nodes, key=lambda node: node.name)


def _reads(status: pb.StatusReply) -> int:
    """Blocks that were asked for: hits, those a node no longer had, and those the master knew nowhere."""
    at_nodes = sum(sum(tier.hits for tier in node.tiers) + node.counters.get("misses", 0) for node in status.nodes)
    return int(at_nodes + status.counters.get("lookup_misses", 0))


def _shown(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.2f}"


def _has_codec(tier: pb.TierStatus) -> bool:
    return bool(tier.codec or tier.elements)


def _encoded_bytes(tier: pb.TierStatus) -> int:
    return tier.payload_bytes + tier.metadata_bytes


def _tier_name(tier: pb.TierStatus) -> Text:
    return Text(tier.name) if tier.health == "ok" else Text(f"{tier.name}: {tier.health}", style="red")
