"""State of a cluster as seen by a client: reports of the masters, health of daemons, shared memory on this host, problems."""

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

REQUEST_S: Final = 2.0
"""Timeout for each master."""
MAX_AT_ONCE: Final = 16
OWNER: Final = "owner"

OK = "ok"
CUT_OFF = "cut off"

PROBE_S: Final = 2.0
"""Timeout of the shared-memory probe of all nodes."""

NEEDS_TENANT: Final = "not checked: it needs a tenant's token and name (--tenant)"

ERROR: Final = "error"


@dataclass(frozen=True, slots=True)
class MasterReport:
    """One master's report, or the error with which the request failed (`error`; the other fields are then empty, but for the role of an
    owner whose control plane does not answer)."""

    address: str
    """To which the request was sent."""
    role: str = ""
    """"owner" if it owns a partition."""
    name: str = ""
    records: int = 0
    behind: int = 0
    """Records that a follower lacks compared with the owner; never negative."""
    catalog_health: str = ""
    http: str = ""
    error: str = ""
    owned: int = 0
    partitions: int = 0
    version: str = ""
    took_s: float = 0.0
    """From the connect to the last response."""


def ask_masters(settings: ClientSettings, owner: pb.StatusReply) -> list[MasterReport]:
    """Request the status of all masters of `settings`, in parallel. `owner` is the owner's status.

    An owner that `settings` do not name comes first, if they name several masters.
    """
    addresses = list(dict.fromkeys(text.strip() for text in settings.master.split(",")))
    if owner.owner.address and owner.owner.address not in addresses and len(addresses) > 1:
        addresses.insert(0, owner.owner.address)  # "" from a master that is cut off from etcd
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        return list(threads.map(lambda address: _ask_master(address, settings, owner), addresses))


def master_line(report: MasterReport, *, known: str = "ok") -> str:
    """Format a report as a line. A catalog health equal to `known` is left out, because it is shown elsewhere."""
    if report.error:
        return f"{report.address}: {report.error}"
    behind = f", {report.behind:,} blocks behind" if report.behind else ""
    health = f", {report.catalog_health}" if report.catalog_health not in ("ok", known) else ""
    share = f" of {report.owned} of {report.partitions} partitions" if report.partitions > 1 and report.owned else ""
    return f"{report.address}: {report.role}{share}{behind}{health}"


def _ask_master(address: str, settings: ClientSettings, owner: pb.StatusReply) -> MasterReport:
    settings = replace(settings, deadline_s=min(REQUEST_S, settings.deadline_s))
    began_s, role = time.monotonic(), ""
    try:
        channel = Channel.open(parse_address(address), hello(settings), Deadline(settings.deadline_s), tls=Certificates.of(settings))
        channel.close()
        welcome = channel.welcome
        if welcome.server != SERVER_MASTER:  # without a control plane: gRPC would print a traceback for an empty address
            return MasterReport(address, error=f"{welcome.name!r} at this address is not a master")
        role = "" if welcome.owner else OWNER
        partitions, control_address = welcome.partitions, welcome.control
        with Control(control_address, settings, *[control_address] * (partitions - 1)) as control:
            statuses = [control.status_of(partition) for partition in range(partitions)]
    except KVStoreError as error:
        return MasterReport(address, role, error=str(error).removeprefix(f"{address}: "))
    status, roles = statuses[0], [one.role for one in statuses]
    role = OWNER if OWNER in roles else status.role
    records = sum(one.records for one in statuses)
    behind = max(0, owner.records - records) if role == "following" else 0
    health = "; ".join(dict.fromkeys(one.catalog_health for one in statuses if one.catalog_health != "ok")) or status.catalog_health
    took_s = time.monotonic() - began_s
    return MasterReport(
        address, role, status.name, records, behind, health, status.http, "", roles.count(OWNER), partitions, status.version, took_s
    )


@dataclass(frozen=True, slots=True)
class DaemonHealth:
    """Health of one daemon. `found` is its role or state, or the problem. `took_s` is 0 for nodes, which the master reports."""

    daemon: str
    name: str
    is_healthy: bool
    found: str
    took_s: float = 0.0


def healths(reports: Sequence[MasterReport], status: pb.StatusReply | None) -> list[DaemonHealth]:
    """Health of the masters in the order of the settings, then of nodes by name. `status` None: no owner, so no nodes."""
    nodes = sorted(status.nodes, key=lambda node: node.name) if status is not None else ()
    return [*map(_health_of_master, reports), *map(_health_of_node, nodes)]


def health_line(one: DaemonHealth) -> str:
    """Format the health of a daemon as a line."""
    if one.found == STOPPED:
        return f"{one.daemon} {one.name} is stopped"
    took = f", took {one.took_s * 1000:.0f} ms" if one.took_s else ""
    return f"{one.daemon} {one.name} is {'healthy' if one.is_healthy else 'unhealthy'}: {one.found}{took}"


def exit_status(found: Sequence[DaemonHealth], *, has_owner: bool) -> int:
    """Return 0 if all running daemons are healthy, 1 if some are not, 2 if no master owns the catalog."""
    return 2 if not has_owner else 0 if all(one.is_healthy for one in found) else 1


def _health_of_master(report: MasterReport) -> DaemonHealth:
    if report.error:
        return DaemonHealth("master", report.address, False, report.error)
    wrong = [report.role] if report.role == CUT_OFF else []
    wrong += [f"catalog: {report.catalog_health}"] if report.catalog_health not in ("", OK) else []
    share = f" of {report.owned} of {report.partitions} partitions" if report.role == OWNER and report.partitions > 1 else ""
    return DaemonHealth("master", report.address, not wrong, "; ".join(wrong) or f"{report.role}{share}", report.took_s)


def _health_of_node(node: pb.NodeStatus) -> DaemonHealth:
    tiers = [f"{tier.name}: {tier.health}" for tier in node.tiers if tier.health not in ("", OK)]
    is_dead = node.state == DEAD
    return DaemonHealth("node", node.name, not (is_dead or tiers), "; ".join([node.state] * is_dead + tiers) or node.state)


def probe_shared_memory(settings: ClientSettings) -> tuple[dict[str, str], str]:
    """Return node -> reason why its memory is not shared ("" if shared), and the reason why the probe failed ("" if not).

    Operators' tokens cannot read blocks, so they are not probed with: the masters would audit a refused request.
    """
    if settings.token and not settings.tenant:
        return {}, NEEDS_TENANT
    try:
        with Client(settings=settings) as client:
            return client.shared_memory(deadline_s=min(PROBE_S, settings.deadline_s)), ""
    except KVStoreError as error:
        return {}, f"not checked: {error}"


def shared_memory_line(found: dict[str, str], why: str) -> str:
    """Format the result of `probe_shared_memory` as a line."""
    parts = [f"{node}: no, {reason}" if reason else f"{node}: yes" for node, reason in sorted(found.items())]
    return "; ".join(parts) or why or "no node on this host"


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """A problem of the cluster, with advice (`todo`). `level` is "error" or "warning"."""

    level: str
    text: str
    todo: str = ""


def find_problems(status: pb.StatusReply, reports: Sequence[MasterReport] = ()) -> list[ClusterProblem]:
    """Return the console's banners and the masters that do not respond, errors first."""
    found = [
        ClusterProblem(one["level"], one["text"], one.get("todo", ""))
        for one in ConsoleModel().document(status, at_s=0.0, wall_s=0.0)["problems"]
    ]
    found += [ClusterProblem("warning", f"Master {one.address} does not respond: {one.error}") for one in reports if one.error]
    return sorted(found, key=lambda one: one.level != ERROR)


def problem_lines(found: Sequence[ClusterProblem]) -> Text:
    """Format each problem as a line, errors in red, with the advice below."""
    shown = Text()
    for one in found:
        shown.append(f"{one.level}: {one.text}\n", "bold red" if one.level == ERROR else "yellow")
        shown.append(f"    {one.todo}\n" if one.todo else "")
    shown.rstrip()
    return shown
