"""Health of each master and node, in the manner of `etcdctl endpoint health`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.client.tools.masters import OWNER, MasterTold
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import DEAD, STOPPED

OK = "ok"
CUT_OFF = "cut off"


@dataclass(frozen=True, slots=True)
class Health:
    """One daemon: `found` is its role or state, or what is wrong with it. `took_s` is 0 of nodes, which their master answers for."""

    daemon: str
    name: str
    is_healthy: bool
    found: str
    took_s: float = 0.0


def of(told: Sequence[MasterTold], status: pb.StatusReply | None) -> list[Health]:
    """Masters in the order in which they are named, then nodes by name; no nodes where no owner answers (`status` None)."""
    nodes = sorted(status.nodes, key=lambda node: node.name) if status is not None else ()
    return [*map(_of_master, told), *map(_of_node, nodes)]


def line(one: Health) -> str:
    """For people."""
    if one.found == STOPPED:
        return f"{one.daemon} {one.name} is stopped"
    took = f", took {one.took_s * 1000:.0f} ms" if one.took_s else ""
    return f"{one.daemon} {one.name} is {'healthy' if one.is_healthy else 'unhealthy'}: {one.found}{took}"


def exit_status(found: Sequence[Health], *, has_owner: bool) -> int:
    """0: all that run are healthy; 1: some are not; 2: no master answers for the cluster."""
    return 2 if not has_owner else 0 if all(one.is_healthy for one in found) else 1


def _of_master(told: MasterTold) -> Health:
    if told.trouble:
        return Health("master", told.address, False, told.trouble)
    wrong = [told.role] if told.role == CUT_OFF else []
    wrong += [f"catalog: {told.catalog_health}"] if told.catalog_health not in ("", OK) else []
    share = f" of {told.owned} of {told.partitions} partitions" if told.role == OWNER and told.partitions > 1 else ""
    return Health("master", told.address, not wrong, "; ".join(wrong) or f"{told.role}{share}", told.took_s)


def _of_node(node: pb.NodeStatus) -> Health:
    tiers = [f"{tier.name}: {tier.health}" for tier in node.tiers if tier.health not in ("", OK)]
    is_dead = node.state == DEAD
    return Health("node", node.name, not (is_dead or tiers), "; ".join([node.state] * is_dead + tiers) or node.state)
