"""Checks of `kvstore doctor` on the cluster: masters, etcd, nodes, connections, releases, clocks and sockets.

Each check has a verdict and advice. Checks only read, and end within a few seconds.
"""

import email.utils
import grp
import http.client
import itertools
import json
import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE
from typing import Final

from kvstore.cli.tools.cluster_report import MasterReport, ask_masters, master_line, probe_shared_memory, shared_memory_line
from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.client.config import ClientSettings
from kvstore.client.control import cluster_status
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, KVStoreError
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.version import VERSION
from kvstore.telemetry.http.listener import url_of

REQUEST_S: Final = 3.0
"""Timeout of the master's status and of each HTTP request."""
MAX_SKEW_S: Final = 2.0
"""HTTP dates have whole seconds. Leases do not depend on wall clocks; tokens, certificates and logs do."""
MAX_CLOCKS: Final = 64
"""Daemons whose clocks are compared, in parallel."""
MIN_ETCD: Final = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
"""Branch -> first release without known data-loss bugs (see README.md)."""

REACH: Final = "kvstore status --master HOST:PORT, where a master runs"

CROWDED_SHARE: Final = 0.9
"""Share of a node's connections above which new clients may soon be refused."""
ADVISED_OPEN_FILES: Final = 65536
"""Enough for 4,096 connections (default of max_connections), memory, files and the node's own connections."""

_UNVERIFIED: Final = ssl._create_unverified_context()
"""Only dates and etcd's health are requested: no secret is sent, and a forged reply does no harm."""

Fetch = Callable[[str], tuple[str, str]]
"""Returns body and Date header of a URL; raises OSError."""


def fetch(url: str) -> tuple[str, str]:
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_S, context=_UNVERIFIED) as response:
            return response.read(1 << 16).decode(errors="replace"), response.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        with error:  # a response with another status than 200
            return error.read(1 << 16).decode(errors="replace"), error.headers.get("Date", "")
    except http.client.RemoteDisconnected:
        raise ConnectionResetError("disconnected without a response") from None
    except http.client.HTTPException as error:  # another service uses the port now
        raise OSError(f"the server does not speak HTTP: {error!r}") from None


def checks(settings: ClientSettings) -> list[Check]:
    """Check the cluster; a single check with the reason if no master responds."""
    try:
        status = cluster_status(replace(settings, deadline_s=min(REQUEST_S, settings.deadline_s)))
        reports = ask_masters(settings, status)
    except KVStoreError as error:
        advice = "give an operator's token or certificate: docs/security.md" if isinstance(error, Denied) else REACH
        return [Check("cluster", CheckVerdict.WARNING, f"not checked: {error}", advice)]
    return examine(status, fetch, reports)


def examine(status: pb.StatusReply, ask: Fetch, reports: Sequence[MasterReport], *, now_s: Callable[[], float] = time.time) -> list[Check]:
    """Evaluate all checks, given the owner's status and the masters' reports."""
    first = [catalog(status), *etcd(status, ask), masters(reports), nodes(status), connections(status)]
    return [*first, releases(status, reports), clock(status, ask, reports, now_s), sockets(status)]


def catalog(status: pb.StatusReply) -> Check:
    found = f"{status.catalog}, {status.catalog_health or 'unknown'}"
    if status.catalog_health == "ok":
        return Check("catalog", CheckVerdict.OK, found)
    return Check(
        "catalog", CheckVerdict.WRONG, found, "docs/operations.md, At three in the morning; etcdctl endpoint status --cluster -w table"
    )


def etcd(status: pb.StatusReply, ask: Fetch) -> list[Check]:
    """Version and health of each etcd member, requested over HTTP without a client certificate. Empty if the catalog is not in etcd."""
    scheme, _, rest = status.catalog.partition("://")
    if scheme not in ("etcd", "etcds"):
        return []
    members = rest.partition("/")[0].split(",")
    protocol = "https" if scheme == "etcds" else "http"
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(lambda member: _member(member, f"{protocol}://{member}", ask), members))


def _cause(error: OSError) -> str:
    """The operating system's error text, without urllib's wrapper."""
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason)


def _member(member: str, url: str, ask: Fetch) -> Check:
    name = f"etcd {member}"
    try:
        version = str(json.loads(ask(f"{url}/version")[0])["etcdserver"])
        health = json.loads(ask(f"{url}/health")[0])
        is_healthy = str(health["health"]).lower() == "true"
    except OSError as error:
        if isinstance(error, ConnectionResetError) and url.startswith("http:"):
            # A TLS port resets plain HTTP. The status hides the query of `etcd://…?ca=FILE`, so try https.
            return _member(member, f"https://{member}", ask)
        if any(isinstance(one, ssl.SSLError) for one in (error, getattr(error, "reason", None))) and url.startswith("https"):
            return Check(name, CheckVerdict.OK, "not checked: it requires a client certificate; see the catalog's health")
        return Check(name, CheckVerdict.WARNING, f"unreachable from here: {_cause(error)}", f"curl {url}/health, on a master's host too")
    except (ValueError, KeyError, TypeError):
        return Check(name, CheckVerdict.WARNING, "the response is not etcd's", f"curl {url}/version: is it etcd, and its client port?")
    if not is_healthy:
        return Check(name, CheckVerdict.WRONG, f"version {version}, unhealthy: {health}", f"etcdctl --endpoints {member} alarm list")
    if _is_old(version):
        fixed = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in MIN_ETCD.items())
        return Check(name, CheckVerdict.WARNING, f"version {version} has known bugs", f"upgrade it to one of {fixed}, or later")
    return Check(name, CheckVerdict.OK, f"version {version}, healthy")


def _is_old(version: str) -> bool:
    major, minor, patch = (*(int(part) for part in version.partition("-")[0].split(".") if part.isdecimal()), 0, 0, 0)[:3]
    branch = (major, minor)
    return branch < min(MIN_ETCD) or patch < MIN_ETCD.get(branch, 0)


def nodes(status: pb.StatusReply) -> Check:
    states = Counter(node.state for node in status.nodes)
    found = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    dead = [node.name for node in status.nodes if node.state == "dead"]
    if dead:
        return Check(
            "nodes",
            CheckVerdict.WARNING,
            f"{found}: {', '.join(dead)}",
            f"start it again; if it will not return: kvstore forget {dead[0]}",
        )
    failing = [
        f"{tier.name} of {node.name}: {tier.health}" for node in status.nodes for tier in node.tiers if tier.health not in ("", "ok")
    ]
    if failing:
        return Check(
            "nodes",
            CheckVerdict.WARNING,
            f"{found}; {'; '.join(failing)}",
            "docs/operations.md, A disk died, and Disk space of an NVMe tier",
        )
    if not states:
        return Check("nodes", CheckVerdict.WARNING, found, "kvstore-node --master HOST:PORT starts one")
    return Check("nodes", CheckVerdict.OK, found)


def connections(status: pb.StatusReply) -> Check:
    """Return whether each node has connections and descriptors left for further clients."""
    crowded = [node for node in status.nodes if node.state != "dead" and _is_crowded(node.counters)]
    if not crowded:
        used = sum(node.counters.get("connections", 0) for node in status.nodes)
        return Check("connections", CheckVerdict.OK, f"{used} at {len(status.nodes)} nodes, none refused")
    found = "; ".join(
        f"{node.name} has {node.counters['connections']} of {node.counters['max_connections']} and refused "
        f"{node.counters.get('refused_connections', 0)}; it may have {node.counters['max_open_files']:,} files open"
        for node in crowded
    )
    advice = (
        f"LimitNOFILE={ADVISED_OPEN_FILES} in its systemd unit, or ulimit -n {ADVISED_OPEN_FILES} before it starts; then max_connections"
    )
    return Check("connections", CheckVerdict.WARNING, found, advice)


def _is_crowded(counters: Mapping[str, int]) -> bool:
    used, allowed = counters.get("connections", 0), counters.get("max_connections", 0)
    return bool(counters.get("refused_connections", 0)) or used > CROWDED_SHARE * allowed > 0


def masters(reports: Sequence[MasterReport]) -> Check:
    """Return whether each master of the settings responds."""
    lost = [one for one in reports if one.error]
    found = f"{len(reports) - len(lost)} of {len(reports)} in --master respond"
    if lost:
        return Check(
            "masters",
            CheckVerdict.WARNING,
            f"{found}; {master_line(lost[0])}",
            "journalctl -u kvstore-master, on its host; then start it again",
        )
    return Check("masters", CheckVerdict.OK, found)


def releases(status: pb.StatusReply, reports: Sequence[MasterReport] = ()) -> Check:
    """Return whether all daemons and this client run one release. Only successive releases are compatible."""
    of_masters = {status.name: status.version} | {one.name: one.version for one in reports if not one.error}
    found = Counter([VERSION, *of_masters.values(), *(node.version for node in status.nodes)])
    if len(found) == 1:
        return Check("releases", CheckVerdict.OK, f"{VERSION} everywhere")
    shown = ", ".join(f"{version or 'unknown'} ({count})" for version, count in sorted(found.items()))
    return Check(
        "releases",
        CheckVerdict.WARNING,
        f"{shown}; this is {VERSION}",
        "finish the upgrade: docs/operations.md, Upgrade; kvstore nodes --json",
    )


def clock(status: pb.StatusReply, ask: Fetch, reports: Sequence[MasterReport], now_s: Callable[[], float]) -> Check:
    """This machine's clock compared with the Date headers of the daemons' HTTP ports."""
    daemons = [*((one.name, one.http) for one in reports), (status.name, status.http), *((node.name, node.http) for node in status.nodes)]
    addresses = {name: http for name, http in daemons if http}
    compared = list(itertools.islice(addresses.items(), MAX_CLOCKS))
    with ThreadPoolExecutor(MAX_CLOCKS) as threads:
        skews_s = threads.map(lambda daemon: _skew_s(daemon[1], ask, now_s), compared)
        found = [(skew_s, name) for skew_s, (name, _) in zip(skews_s, compared, strict=True) if skew_s is not None]
    if not found:
        return Check("clock", CheckVerdict.OK, "not compared: no daemon's HTTP port is reachable from here")
    skew_s, name = max(found)
    if skew_s > MAX_SKEW_S:
        return Check(
            "clock", CheckVerdict.WARNING, f"{skew_s:.0f} s off that of {name}", f"timedatectl set-ntp true, here or on the host of {name}"
        )
    return Check("clock", CheckVerdict.OK, f"in step with {len(found)} daemon{'s' * (len(found) > 1)}")


def _skew_s(http: str, ask: Fetch, now_s: Callable[[], float]) -> float | None:
    """Difference between this machine's clock and a daemon's, in seconds; None if it cannot be requested."""
    try:
        date = ask(f"{url_of(http)}/healthz")[1]
        skew_s = now_s() - email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError):
        return None
    # Date headers are rounded down to whole seconds.
    return max(0.0, abs(skew_s - 0.5) - 0.5)


def sockets(status: pb.StatusReply) -> Check:
    """Permissions of the Unix sockets of the nodes on this host."""
    found, is_open = [], False
    for node in status.nodes:
        path = Path(node.unix)
        if node.unix and node.state not in NOT_RUNNING and path.is_socket():
            mode, group = S_IMODE(path.stat().st_mode), path.stat().st_gid
            is_open |= bool(mode & 0o006)
            users = "every user" if mode & 0o006 else f"group {_group(group)}" if mode & 0o060 else "their owner only"
            found.append(f"{node.name}: {mode:04o}, {users}")
    if is_open:
        return Check(
            "Unix sockets", CheckVerdict.WARNING, "; ".join(found), "kvstore-node --socket-group GROUP --socket-mode 0660: docs/sharing.md"
        )
    return Check("Unix sockets", CheckVerdict.OK, "; ".join(found) or "no node on this host")


def _group(gid: int) -> str:
    try:
        found = grp.getgrgid(gid)
    except KeyError:
        return str(gid)
    return f"{found.gr_name} ({', '.join(found.gr_mem) or 'no further members'})"


def shared_memory_checks(settings: ClientSettings) -> list[Check]:
    """One check per node of this host; a single one if there is none or no master responds."""
    found, why = probe_shared_memory(settings)
    if not found:
        return [Check("shared memory", CheckVerdict.OK, shared_memory_line(found, why))]
    return [
        Check(
            f"shared memory, {node}",
            CheckVerdict.WARNING,
            f"no: {reason}",
            "see docs/sharing.md for other users and containers",
        )
        if reason
        else Check(f"shared memory, {node}", CheckVerdict.OK, "yes")
        for node, reason in sorted(found.items())
    ]


def are_well(found: Iterable[Check]) -> bool:
    """Return whether no check has the verdict WRONG."""
    return all(check.verdict is not CheckVerdict.WRONG for check in found)
