"""A cluster as a client sees it: the answer of each master, health of masters and nodes, shared memory on this host, troubles."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from rich.text import Text

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, hello
from kvstore.client.sync import Client
from kvstore.console.model import ConsoleModel
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.node_states import DEAD, STOPPED
from kvstore.protocol.session_messages import SERVER_MASTER
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates

LOOK_S: Final = 2.0
"""For each: one that does not answer is no reason to wait long."""
MAX_AT_ONCE: Final = 16
OWNER: Final = "owner"

OK = "ok"
CUT_OFF = "cut off"

PROBE_S: Final = 2.0
"""For all of it: a node that does not answer is no reason to wait long."""

NEEDS_TENANT: Final = "not looked at: it needs a tenant's token and name (--tenant)"

ERROR: Final = "error"


@dataclass(frozen=True, slots=True)
class MasterReport:
    """One master, at the address at which it was asked. `behind` is how many blocks fewer than the owners it knows of, 0 for more; `owned`
    how many partitions it owns, and `role` "owner" where it owns any; with `trouble` it has not answered, and the rest is empty."""

    address: str
    role: str = ""
    name: str = ""
    records: int = 0
    behind: int = 0
    catalog_health: str = ""
    http: str = ""
    trouble: str = ""
    owned: int = 0
    partitions: int = 0
    version: str = ""
    took_s: float = 0.0
    """From connecting to the last answer."""


def ask_masters(settings: ClientSettings, owner: pb.StatusReply) -> list[MasterReport]:
    """All masters that `settings` name, when the owner has told `owner`; the owner's own first if it is none of them."""
    addresses = list(dict.fromkeys(text.strip() for text in settings.master.split(",")))
    if owner.owner.address and owner.owner.address not in addresses and len(addresses) > 1:
        addresses.insert(0, owner.owner.address)  # one that is cut off knows of no owner
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        return list(threads.map(lambda address: _ask_master(address, settings, owner), addresses))


def master_line(told: MasterReport, *, known: str = "ok") -> str:
    """For people. Not `known`, the health of the catalog that is told elsewhere."""
    if told.trouble:
        return f"{told.address}: {told.trouble}"
    behind = f", {told.behind:,} blocks behind" if told.behind else ""
    health = f", {told.catalog_health}" if told.catalog_health not in ("ok", known) else ""
    share = f" of {told.owned} of {told.partitions} partitions" if told.partitions > 1 and told.owned else ""
    return f"{told.address}: {told.role}{share}{behind}{health}"


def _ask_master(address: str, settings: ClientSettings, owner: pb.StatusReply) -> MasterReport:
    settings = replace(settings, deadline_s=min(LOOK_S, settings.deadline_s))
    began_s = time.monotonic()
    try:
        channel = Channel.open(parse_address(address), hello(settings), Deadline(settings.deadline_s), tls=Certificates.of(settings))
        channel.close()
        welcome = channel.welcome
        if welcome.server != SERVER_MASTER:  # nor has it a control plane: gRPC tells of an empty address in traces of its own
            return MasterReport(address, trouble=f"it is {welcome.name!r}, which is no master")
        partitions, control_address = welcome.partitions, welcome.control
        with Control(control_address, settings, *[control_address] * (partitions - 1)) as control:
            told = [control.status_of(partition) for partition in range(partitions)]
    except KVStoreError as error:
        return MasterReport(address, trouble=str(error))
    status, roles = told[0], [one.role for one in told]
    role = OWNER if OWNER in roles else status.role
    records = sum(one.records for one in told)
    behind = max(0, owner.records - records) if role == "following" else 0
    health = "; ".join(dict.fromkeys(one.catalog_health for one in told if one.catalog_health != "ok")) or status.catalog_health
    took_s = time.monotonic() - began_s
    return MasterReport(
        address, role, status.name, records, behind, health, status.http, "", roles.count(OWNER), partitions, status.version, took_s
    )


@dataclass(frozen=True, slots=True)
class DaemonHealth:
    """One daemon: `found` is its role or state, or what is wrong with it. `took_s` is 0 of nodes, which their master answers for."""

    daemon: str
    name: str
    is_healthy: bool
    found: str
    took_s: float = 0.0


def healths(told: Sequence[MasterReport], status: pb.StatusReply | None) -> list[DaemonHealth]:
    """Masters in the order in which they are named, then nodes by name; no nodes where no owner answers (`status` None)."""
    nodes = sorted(status.nodes, key=lambda node: node.name) if status is not None else ()
    return [*map(_health_of_master, told), *map(_health_of_node, nodes)]


def health_line(one: DaemonHealth) -> str:
    """For people."""
    if one.found == STOPPED:
        return f"{one.daemon} {one.name} is stopped"
    took = f", took {one.took_s * 1000:.0f} ms" if one.took_s else ""
    return f"{one.daemon} {one.name} is {'healthy' if one.is_healthy else 'unhealthy'}: {one.found}{took}"


def exit_status(found: Sequence[DaemonHealth], *, has_owner: bool) -> int:
    """0: all that run are healthy; 1: some are not; 2: no master answers for the cluster."""
    return 2 if not has_owner else 0 if all(one.is_healthy for one in found) else 1


def _health_of_master(told: MasterReport) -> DaemonHealth:
    if told.trouble:
        return DaemonHealth("master", told.address, False, told.trouble)
    wrong = [told.role] if told.role == CUT_OFF else []
    wrong += [f"catalog: {told.catalog_health}"] if told.catalog_health not in ("", OK) else []
    share = f" of {told.owned} of {told.partitions} partitions" if told.role == OWNER and told.partitions > 1 else ""
    return DaemonHealth("master", told.address, not wrong, "; ".join(wrong) or f"{told.role}{share}", told.took_s)


def _health_of_node(node: pb.NodeStatus) -> DaemonHealth:
    tiers = [f"{tier.name}: {tier.health}" for tier in node.tiers if tier.health not in ("", OK)]
    is_dead = node.state == DEAD
    return DaemonHealth("node", node.name, not (is_dead or tiers), "; ".join([node.state] * is_dead + tiers) or node.state)


def probe_shared_memory(settings: ClientSettings) -> tuple[dict[str, str], str]:
    """By node why not, "" where memory is shared; and why that could not be found out, "" if it was.

    An operator's token reads no blocks. The masters are not asked with one: they would record a refused request.
    """
    if settings.token and not settings.tenant:
        return {}, NEEDS_TENANT
    try:
        with Client(settings=settings) as client:
            return client.shared_memory(deadline_s=min(PROBE_S, settings.deadline_s)), ""
    except KVStoreError as error:
        return {}, f"not looked at: {error}"


def shared_memory_line(found: dict[str, str], why: str) -> str:
    """For people."""
    told = [f"{node}: no, {reason}" if reason else f"{node}: yes" for node, reason in sorted(found.items())]
    return "; ".join(told) or why or "no node on this host"


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """One thing that an operator should know, and what to do about it. `level` is "error" or "warning"."""

    level: str
    text: str
    todo: str = ""


def troubles(status: pb.StatusReply, told: Sequence[MasterReport] = ()) -> list[ClusterProblem]:
    """The console's troubles, and the masters that were asked and do not answer."""
    found = [
        ClusterProblem(one["level"], one["text"], one.get("todo", ""))
        for one in ConsoleModel().document(status, at_s=0.0, wall_s=0.0)["troubles"]
    ]
    found += [ClusterProblem("warning", f"Master {one.address} does not answer: {one.trouble}") for one in told if one.trouble]
    return sorted(found, key=lambda one: one.level != ERROR)


def trouble_lines(found: Sequence[ClusterProblem]) -> Text:
    """One line each, errors in red, and below it what to do."""
    shown = Text()
    for one in found:
        shown.append(f"{one.level}: {one.text}\n", "bold red" if one.level == ERROR else "yellow")
        shown.append(f"    {one.todo}\n" if one.todo else "")
    shown.rstrip()
    return shown
