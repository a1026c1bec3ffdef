"""Merge of the status replies of several partition owners into one. Pure: control-plane messages in, one message out.

Each owner reports all nodes, with the blocks of its own partition. Values of a master's process count once, however
many partitions it owns.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.protocol import control_pb2 as pb

_STATES: Final = ("alive", "syncing", "stopped", "dead")
"""Node states, best first. A node has its worst state of all partitions: that partition's blocks of it are unreachable.
"""
OF_PROCESS: Final = ("request_", "credentials_refused")
"""Name prefixes of counters of a process, not of a partition."""
OF_MASTER: Final = ("home_copies_skipped",)
"""A node's counters that the masters count, each for its partition."""


def merged_status(replies: Sequence[pb.StatusReply]) -> pb.StatusReply:
    """Merge the replies of partitions 0, 1, ...: the first one with the sums of all.

    A single reply is returned unchanged.
    """
    if len(replies) == 1:
        return replies[0]
    found = pb.StatusReply()
    found.CopyFrom(replies[0])
    found.blocks, found.reserved, found.pinned, found.records = (
        sum(getattr(reply, name) for reply in replies) for name in ("blocks", "reserved", "pinned", "records")
    )
    problems = dict.fromkeys(reply.catalog_health for reply in replies if reply.catalog_health != "ok")
    found.catalog_health = "; ".join(problems) or "ok"
    processes = {reply.name: reply for reply in replies}.values()
    found.rss_bytes = sum(reply.rss_bytes for reply in processes)
    found.counters.clear()
    for reply in replies:
        for name, count in reply.counters.items():
            if not name.startswith(OF_PROCESS):
                found.counters[name] += count
    for reply in processes:
        for name, count in reply.counters.items():
            if name.startswith(OF_PROCESS):
                found.counters[name] = max(found.counters[name], count) if name.endswith("_slowest_us") else found.counters[name] + count
    are_owners = not any(reply.role == "following" for reply in replies)
    named: dict[str, list[pb.NodeStatus]] = {}
    for reply in replies:
        for node in reply.nodes:
            named.setdefault(node.name, []).append(node)
    for node in found.nodes:
        _merge_node(node, named[node.name], are_owners=are_owners)
    _merge_grants(found, replies, processes)
    return found


def _merge_node(node: pb.NodeStatus, each: Sequence[pb.NodeStatus], *, are_owners: bool) -> None:
    """`are_owners`: every partition's owner replied; a follower knows neither nodes nor remaining blocks."""
    node.blocks = sum(one.blocks for one in each)
    for name in OF_MASTER:
        node.counters[name] = sum(one.counters.get(name, 0) for one in each)
    node.state = max((one.state for one in each), key=_STATES.index)
    drains = [one.drain for one in each if one.HasField("drain")]
    if not drains:
        return
    total: Callable[[str], int] = lambda name: sum(getattr(drain, name) for drain in drains)  # noqa: E731
    node.drain.CopyFrom(
        pb.DrainStatus(
            to=drains[0].to,
            is_done=are_owners and len(drains) == len(each) and all(drain.is_done for drain in drains),
            remaining_blocks=total("remaining_blocks"),
            nvme_only_blocks=total("nvme_only_blocks"),
            copying_blocks=total("copying_blocks"),
            lacks_space=any(drain.lacks_space for drain in drains),
        )
    )


def _merge_grants(found: pb.StatusReply, replies: Sequence[pb.StatusReply], processes: Iterable[pb.StatusReply]) -> None:
    """Sum pins and reservations over partitions, requests and connections over processes."""
    grants: dict[str, pb.TenantGrants] = {}
    for reply in replies:
        for grant in reply.grants:
            one = grants.setdefault(grant.tenant, pb.TenantGrants(tenant=grant.tenant))
            one.pins += grant.pins
            one.reservations += grant.reservations
    for reply in processes:
        for grant in reply.grants:
            grants[grant.tenant].requests_in_flight += grant.requests_in_flight
            grants[grant.tenant].connections += grant.connections
    del found.grants[:]
    found.grants.extend(grants.values())
