"""The console's JSON document of a cluster, computed from a master's status and the status before. Sans-I/O: the time is passed in.

Nodes are rows under a list of field names: 320 kB for a thousand nodes, two thirds of what objects take. Units: rates per second, sizes in
bytes, shares 0 to 1; null is unknown.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore.console.banners import Banners, find_banners, tier_health
from kvstore.console.moves import counters_of, home_copies_of, moves, skipped
from kvstore.console.rates import RateTracker
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING

TIERS: Final = ("hbm", "dram", "nvme")
"""Fastest first."""
RATED: Final = frozenset(("misses", "in_bytes", "out_bytes", "engine_bytes", "local_reads", "remote_reads"))
_REQUEST: Final = "request_"
_SLOWEST: Final = "_slowest_us"
TIER_COUNTERS: Final = ("hits", "evictions", "demotions", "promotions")
NODE_FIELDS: Final = (
    "id", "name", "state", "drain", "remaining_blocks", "health", "address", "host", "version", "transports", "heartbeat_age_s", "blocks",
    "used_bytes", "capacity_bytes", *(f"{tier}_{what}" for tier in TIERS for what in ("used_bytes", "capacity_bytes")),
    "hits_per_s", "misses_per_s", "in_bytes_per_s", "out_bytes_per_s", "evictions_per_s", "connections",
    "next_victims", "home_copies_sent", "home_copies_received", "home_copies_skipped",
)  # fmt: skip
MASTER: Final = "\n"
"""Name of the master in RateTracker; no node can have this name."""

Document = dict[str, Any]


class ConsoleModel:
    """Computes a document per poll; keeps the state for rates and for the begin of problems. Not thread-safe."""

    def __init__(self) -> None:
        self._rates, self._banners = RateTracker(), Banners()

    def document(self, status: pb.StatusReply, *, at_s: float, wall_s: float, missing: Sequence[str] = (), age_s: float = 0.0) -> Document:
        """Return the document for a status.

        `at_s` is monotonic time, `wall_s` Unix time. `missing`: a line per master that did not respond; `age_s`: age of the oldest part of
        the status.
        """
        nodes = [self._node(node, at_s) for node in sorted(status.nodes, key=lambda node: node.name)]
        epochs = status.epoch, *((owner.name, owner.epoch) for owner in status.owners)  # a new owner's counters start at 0
        own = self._rates.of(MASTER, at_s=at_s - age_s, epoch=epochs, counters=dict(status.counters))
        self._rates.keep([MASTER, *(node["name"] for node in nodes)])
        tiers = [tier for name in TIERS if (tier := _tier(name, nodes))]
        totals = _totals(nodes, tiers, status, own)
        owner = status.owner
        return {
            "time_s": wall_s,
            "master": {
                "name": status.name,
                "role": status.role,
                "version": status.version,
                "uptime_s": status.uptime_s,
                "rss_bytes": status.rss_bytes,
                # A string: epochs exceed JavaScript's integers.
                "owner": {"name": owner.name, "address": owner.address, "epoch": str(owner.epoch)},
            },
            "catalog": {"address": status.catalog, "health": status.catalog_health, "records": status.records, "shards": status.shards}
            | {"partitions": max(1, status.partitions), "shares": shares(status)},
            "problems": self._banners.of(find_banners(status, missing, shares(status)), wall_s),
            "totals": totals,
            "tiers": tiers,
            "moves": _moves(status, nodes),
            "paths": _paths(status),
            "operations": operations(status, [(node["name"], node["rates"]) for node in nodes if node["state"] not in NOT_RUNNING], own),
            "nodes": {"fields": NODE_FIELDS, "rows": [[node[name] for name in NODE_FIELDS] for node in nodes]},
        }

    def _node(self, node: pb.NodeStatus, at_s: float) -> Document:
        counters: dict[str, float] = {name: count for name, count in node.counters.items() if name in RATED or name.startswith(_REQUEST)}
        counters |= {f"{tier.name}_{name}": getattr(tier, name) for tier in node.tiers for name in TIER_COUNTERS}
        counters |= counters_of(node)
        rates = self._rates.of(node.name, at_s=at_s - node.heartbeat_age_s, epoch=node.registration_epoch, counters=counters)
        if node.state in NOT_RUNNING:
            rates = {}
        found: Document = {
            "id": node.node_id,
            "name": node.name,
            "state": node.state,
            "drain": "" if not node.HasField("drain") else "drained" if node.drain.is_done else "draining",
            "remaining_blocks": node.drain.remaining_blocks,
            "health": tier_health(node),
            "address": node.tcp or node.unix,
            "host": node.host_id,
            "version": node.version,
            "transports": list(node.transports),
            "heartbeat_age_s": round(node.heartbeat_age_s, 1),
            "blocks": node.blocks,
            "misses_per_s": _short(rates.get("misses", 0)),
            "in_bytes_per_s": _short(rates.get("in_bytes", 0)),
            "out_bytes_per_s": _short(rates.get("out_bytes", 0) + rates.get("engine_bytes", 0)),
            "connections": node.counters.get("connections", 0),
            "tiers": {tier.name: tier for tier in node.tiers},
            "rates": rates,
            "next_victims": [_next_victim(tier) for tier in node.tiers if tier.HasField("next_victim")],
            **{f"home_copies_{name}": count for name, count in home_copies_of(node).items()},
        }
        for what in ("used_bytes", "capacity_bytes"):
            found[what] = sum(getattr(tier, what) for tier in node.tiers)
            found |= {f"{name}_{what}": getattr(found["tiers"].get(name), what, 0) for name in TIERS}
        for what in ("hits", "evictions"):
            found[f"{what}_per_s"] = _short(sum(rates.get(f"{name}_{what}", 0) for name in TIERS))
        return found


def _next_victim(tier: pb.TierStatus) -> list[Any]:
    """Return [tier, reason, seconds unread, hits per second of a GiB or null] of what the tier would evict next. A list, since all nodes
    have some."""
    found = tier.next_victim
    worth = float(f"{found.hits_per_byte_s * (1 << 30):.3g}") if found.HasField("hits_per_byte_s") else None
    return [tier.name, found.reason, round(found.unread_s), worth]


def _moves(status: pb.StatusReply, nodes: list[Document]) -> Document:
    """Return the blocks that moved or left, by reason, and those without a home copy."""
    rows = [
        {
            "reason": one.counter,
            "text": one.text,
            "blocks": one.blocks,
            "bytes": one.size_bytes,
            "blocks_per_s": _short(sum(node["rates"].get(one.counter, 0) for node in nodes)),
        }
        for one in moves(status)
        if one.blocks
    ]
    return {"rows": rows, "without_home_copy": skipped(status.counters)}


def shares(status: pb.StatusReply) -> dict[str, int]:
    """Return master name -> number of partitions that it owns; empty for a cluster with a single partition."""
    owned = Counter(owner.name for owner in status.owners if owner.name) if status.partitions > 1 else {}
    return dict(sorted(owned.items()))


def figures(document: Document) -> dict[str, float | None]:
    """Return the cluster's figures for the history, by name."""
    totals = document["totals"]
    tiers = {f"{tier['name']}_{name}": tier[name] for tier in document["tiers"] for name in ("used_bytes", "hits_per_s", "evictions_per_s")}
    return {name: totals[name] for name in TOTALS_KEPT} | tiers


def node_figures(document: Document) -> dict[str, dict[str, float | None]]:
    """Return node name -> figures for the history."""
    fields, name_at = document["nodes"]["fields"], NODE_FIELDS.index("name")
    indices = [(name, fields.index(name)) for name in NODE_KEPT]
    return {row[name_at]: {name: row[index] for name, index in indices} for row in document["nodes"]["rows"]}


TOTALS_KEPT: Final = (
    "alive", "blocks", "used_bytes", "hit_ratio", "hits_per_s", "misses_per_s", "in_bytes_per_s", "out_bytes_per_s", "evictions_per_s",
    "keys_per_s",
)  # fmt: skip
KEPT: Final = (*TOTALS_KEPT, *(f"{tier}_{name}" for tier in TIERS for name in ("used_bytes", "hits_per_s", "evictions_per_s")))
NODE_KEPT: Final = ("used_bytes", "hits_per_s", "misses_per_s", "in_bytes_per_s", "out_bytes_per_s", "evictions_per_s")


def _tier(name: str, nodes: list[Document]) -> Document | None:
    """Sum of a tier over the live nodes; None if no node has it."""
    having = [(node["tiers"][name], node["rates"]) for node in nodes if name in node["tiers"] and node["state"] not in NOT_RUNNING]
    if not having:
        return None
    sums = {what: sum(getattr(tier, what) for tier, _rates in having) for what in ("used_bytes", "capacity_bytes", "blocks")}
    rates = {f"{what}_per_s": _short(sum(rates.get(f"{name}_{what}", 0) for _tier, rates in having)) for what in TIER_COUNTERS}
    return {"name": name, "nodes": len(having), **sums, **rates}


def _totals(nodes: list[Document], tiers: list[Document], status: pb.StatusReply, own: Mapping[str, float]) -> Document:
    def added(name: str) -> float:
        return _short(sum(node[name] for node in nodes))

    local, remote = (sum(node["rates"].get(name, 0) for node in nodes) for name in ("local_reads", "remote_reads"))
    hits = added("hits_per_s")
    misses = _short(added("misses_per_s") + own.get("lookup_misses", 0))
    return {
        "nodes": len(nodes),
        "alive": sum(node["state"] == "alive" for node in nodes),
        "stopped": sum(node["state"] == "stopped" for node in nodes),
        "syncing": sum(node["state"] == "syncing" for node in nodes),
        "draining": sum(bool(node["drain"]) for node in nodes),
        "blocks": status.blocks,
        "reserved": status.reserved,
        "pinned": status.pinned,
        "used_bytes": sum(tier["used_bytes"] for tier in tiers),
        "capacity_bytes": sum(tier["capacity_bytes"] for tier in tiers),
        "hits_per_s": hits,
        "misses_per_s": misses,
        "hit_ratio": round(hits / (hits + misses), 4) if hits + misses else None,
        "local_ratio": round(local / (local + remote), 4) if local + remote else None,
        "in_bytes_per_s": added("in_bytes_per_s"),
        "out_bytes_per_s": added("out_bytes_per_s"),
        "evictions_per_s": added("evictions_per_s"),
        "requests_per_s": _short(own.get("requests", 0)),
        "keys_per_s": _short(own.get("keys", 0)),
        "corrupt_reads": sum(node.counters.get("corrupt_reads", 0) for node in status.nodes),
    }


def operations(status: pb.StatusReply, nodes: Sequence[tuple[str, Mapping[str, float]]], own: Mapping[str, float]) -> list[Document]:
    """Return rates and latencies by operation, for the master and for all nodes together, the slowest of the last minute first."""
    at = {node.name: node.counters for node in status.nodes}
    return sorted(
        [*_operations("master", [(status.name or "master", own, status.counters)])]
        + [*_operations("nodes", [(name, rates, at[name]) for name, rates in nodes])],
        key=lambda one: -one["slowest_s"],
    )


def _operations(where: str, daemons: Sequence[tuple[str, Mapping[str, float], Mapping[str, int]]]) -> Iterator[Document]:
    found: dict[str, list[float]] = {}
    slowest: dict[str, tuple[int, str]] = {}
    for daemon, rates, counters in daemons:
        for key, value in counters.items():
            if key.startswith(_REQUEST) and key.endswith(_SLOWEST):
                name = key[len(_REQUEST) : -len(_SLOWEST)]
                sums = found.setdefault(name, [0.0, 0.0])
                sums[0] += rates.get(f"{_REQUEST}{name}_count", 0)
                sums[1] += rates.get(f"{_REQUEST}{name}_us", 0)
                slowest[name] = max(slowest.get(name, (0, daemon)), (value, daemon))
    for name, (per_s, us_per_s) in found.items():
        yield {
            "operation": name,
            "where": where,
            "per_s": _short(per_s),
            "mean_s": _short(us_per_s / per_s / 1e6) if per_s else None,
            "slowest_s": slowest[name][0] / 1e6,
            "slowest_at": slowest[name][1],
        }


MAX_PATHS: Final = 200


def _paths(status: pb.StatusReply) -> list[Document]:
    """Recently measured rates between nodes, slowest first."""
    names = {node.node_id: node.name for node in status.nodes}
    found = [(rate.bytes_per_s, names.get(rate.node_id, f"node {rate.node_id}"), node.name) for node in status.nodes for rate in node.rates]
    return [{"from": source, "to": target, "bytes_per_s": _short(rate)} for rate, source, target in sorted(found)[:MAX_PATHS]]


def _short(value: float) -> float:
    """Round to four digits, as shown; this halves the JSON."""
    return float(f"{value:.4g}")
