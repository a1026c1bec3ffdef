"""How the cluster that this machine belongs to fares, as far as a client sees it: its masters, etcd, releases, clocks and sockets.

Each check says what mends it, as those of doctor.py do. Nothing here changes anything; all of it is over in a few seconds.
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
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.version import VERSION
from kvstore.telemetry.http.listener import url_of

LOOK_S: Final = 3.0
"""For the master, and for each of what is asked by HTTP."""
MAX_SKEW_S: Final = 2.0
"""HTTP tells the time in whole seconds. Leases count on nobody's clock; tokens, certificates and logs do."""
MAX_CLOCKS: Final = 64
"""Compared, all at once."""
MIN_ETCD: Final = {(3, 4): 42, (3, 5): 28, (3, 6): 9}
"""By branch the first release without faults that lose data, as README.md says."""

CROWDED_SHARE: Final = 0.9
"""Of a node's connections: beyond it the next clients may be refused."""
WANTED_OPEN_FILES: Final = 65536
"""For 4,096 connections, max_connections by default, and for memory, files and the node's own connections."""

_TRUSTING: Final = ssl._create_unverified_context()
"""What is asked so is what time it is there, and how etcd fares: nothing is told, and little believed."""

Fetch = Callable[[str], tuple[str, str]]
"""Body and Date header of what answers at a URL; raises OSError."""


def fetch(url: str) -> tuple[str, str]:
    try:
        with urllib.request.urlopen(url, timeout=LOOK_S, context=_TRUSTING) as answer:
            return answer.read(1 << 16).decode(errors="replace"), answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        with error:  # an answer, though not 200
            return error.read(1 << 16).decode(errors="replace"), error.headers.get("Date", "")
    except http.client.RemoteDisconnected:
        raise ConnectionResetError("hung up without an answer") from None
    except http.client.HTTPException as error:  # something else has the port now
        raise OSError(f"what answers there does not speak HTTP: {error!r}") from None


def checks(settings: ClientSettings) -> list[Check]:
    """One says why where no master answers."""
    try:
        status = cluster_status(replace(settings, deadline_s=min(LOOK_S, settings.deadline_s)))
        told = ask_masters(settings, status)
    except KVStoreError as error:
        return [Check("cluster", CheckVerdict.WARNING, f"not looked at: {error}", "kvstore status --master HOST:PORT, where a master runs")]
    return examine(status, fetch, told)


def examine(status: pb.StatusReply, ask: Fetch, told: Sequence[MasterReport], *, now_s: Callable[[], float] = time.time) -> list[Check]:
    """Those of a cluster whose owner has told this, and whose masters, those that are known of, that."""
    well = [catalog(status), *etcd(status, ask), masters(told), nodes(status), connections(status)]
    return [*well, releases(status, told), clock(status, ask, told, now_s), sockets(status)]


def catalog(status: pb.StatusReply) -> Check:
    found = f"{status.catalog}, {status.catalog_health or 'unknown'}"
    if status.catalog_health == "ok":
        return Check("catalog", CheckVerdict.OK, found)
    return Check(
        "catalog", CheckVerdict.WRONG, found, "docs/operations.md, At three in the morning; etcdctl endpoint status --cluster -w table"
    )


def etcd(status: pb.StatusReply, ask: Fetch) -> list[Check]:
    """Version and health of each member, asked as curl would, without a certificate; nothing where the catalog is not in etcd."""
    scheme, _, rest = status.catalog.partition("://")
    if scheme not in ("etcd", "etcds"):
        return []
    members = rest.partition("/")[0].split(",")
    speaks = "https" if scheme == "etcds" else "http"
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(lambda member: _member(member, f"{speaks}://{member}", ask), members))


def _cause(error: OSError) -> str:
    """The system's own words, without urllib's around them."""
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
            # As one does that wants TLS: of `etcd://…?ca=FILE` the status hides what follows the prefix.
            return _member(member, f"https://{member}", ask)
        if any(isinstance(one, ssl.SSLError) for one in (error, getattr(error, "reason", None))) and url.startswith("https"):
            return Check(name, CheckVerdict.OK, "not looked at: it wants a certificate; how it fares the catalog's health says")
        return Check(name, CheckVerdict.WARNING, f"does not answer here: {_cause(error)}", f"curl {url}/health, on a master's host too")
    except (ValueError, KeyError, TypeError):
        return Check(name, CheckVerdict.WARNING, "does not answer as etcd does", f"curl {url}/version: is it etcd, and its client port?")
    if not is_healthy:
        return Check(name, CheckVerdict.WRONG, f"version {version}, unhealthy: {health}", f"etcdctl --endpoints {member} alarm list")
    if _is_old(version):
        wanted = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in MIN_ETCD.items())
        return Check(name, CheckVerdict.WARNING, f"version {version} has known faults", f"upgrade it to one of {wanted}, or later")
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
            f"start it again; if it is gone for good: kvstore forget {dead[0]}",
        )
    if not states:
        return Check("nodes", CheckVerdict.WARNING, found, "kvstore-node --master HOST:PORT starts one")
    return Check("nodes", CheckVerdict.OK, found)


def connections(status: pb.StatusReply) -> Check:
    """Whether each node has a place and a descriptor left for further clients."""
    crowded = [node for node in status.nodes if node.state != "dead" and _is_crowded(node.counters)]
    if not crowded:
        used = sum(node.counters.get("connections", 0) for node in status.nodes)
        return Check("connections", CheckVerdict.OK, f"{used} at {len(status.nodes)} nodes, none was refused")
    found = "; ".join(
        f"{node.name} has {node.counters['connections']} of {node.counters['max_connections']} and refused "
        f"{node.counters.get('refused_connections', 0)}; it may have {node.counters['max_open_files']:,} files open"
        for node in crowded
    )
    advice = f"LimitNOFILE={WANTED_OPEN_FILES} in its systemd unit, or ulimit -n {WANTED_OPEN_FILES} before it starts; then max_connections"
    return Check("connections", CheckVerdict.WARNING, found, advice)


def _is_crowded(counters: Mapping[str, int]) -> bool:
    used, allowed = counters.get("connections", 0), counters.get("max_connections", 0)
    return bool(counters.get("refused_connections", 0)) or used > CROWDED_SHARE * allowed > 0


def masters(told: Sequence[MasterReport]) -> Check:
    """Whether each that is named answers."""
    lost = [one for one in told if one.trouble]
    found = f"{len(told) - len(lost)} of {len(told)} that are named answer"
    if lost:
        return Check(
            "masters",
            CheckVerdict.WARNING,
            f"{found}; {master_line(lost[0])}",
            "journalctl -u kvstore-master, on its host; then start it again",
        )
    return Check("masters", CheckVerdict.OK, found)


def releases(status: pb.StatusReply, told: Sequence[MasterReport] = ()) -> Check:
    """Two that follow one another understand one another; more than that is somebody who was forgotten."""
    of_masters = {status.name: status.version} | {one.name: one.version for one in told if not one.trouble}
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


def clock(status: pb.StatusReply, ask: Fetch, told: Sequence[MasterReport], now_s: Callable[[], float]) -> Check:
    """This machine's against those of the daemons' hosts, which their HTTP ports tell where they can be reached from here."""
    daemons = [*((one.name, one.http) for one in told), (status.name, status.http), *((node.name, node.http) for node in status.nodes)]
    places = {name: http for name, http in daemons if http}
    asked = list(itertools.islice(places.items(), MAX_CLOCKS))
    with ThreadPoolExecutor(MAX_CLOCKS) as threads:
        offs_s = threads.map(lambda place: _off_s(place[1], ask, now_s), asked)
        found = [(off_s, name) for off_s, (name, _) in zip(offs_s, asked, strict=True) if off_s is not None]
    if not found:
        return Check("clock", CheckVerdict.OK, "not compared: no daemon's HTTP port can be reached from here")
    off_s, name = max(found)
    if off_s > MAX_SKEW_S:
        return Check(
            "clock", CheckVerdict.WARNING, f"{off_s:.0f} s off that of {name}", f"timedatectl set-ntp true, here or on the host of {name}"
        )
    return Check("clock", CheckVerdict.OK, f"as those of {len(found)} daemon{'s' * (len(found) > 1)}")


def _off_s(http: str, ask: Fetch, now_s: Callable[[], float]) -> float | None:
    """By how much this machine's clock differs from that of a daemon's host; None where it does not tell."""
    try:
        date = ask(f"{url_of(http)}/healthz")[1]
        skew_s = now_s() - email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError):
        return None
    # The header has whole seconds, rounded down.
    return max(0.0, abs(skew_s - 0.5) - 0.5)


def sockets(status: pb.StatusReply) -> Check:
    """Who may use the Unix sockets of the nodes on this host, as files say it."""
    found, is_open = [], False
    for node in status.nodes:
        path = Path(node.unix)
        if node.unix and node.state not in NOT_RUNNING and path.is_socket():
            mode, group = S_IMODE(path.stat().st_mode), path.stat().st_gid
            is_open |= bool(mode & 0o006)
            whom = "every user" if mode & 0o006 else f"group {_group(group)}" if mode & 0o060 else "their owner only"
            found.append(f"{node.name}: {mode:04o}, {whom}")
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
    return f"{found.gr_name} ({', '.join(found.gr_mem) or 'nobody else'})"


def shared_memory_checks(settings: ClientSettings) -> list[Check]:
    """One for each node of this host; one that says so where there is none, or no master that would tell."""
    found, why = probe_shared_memory(settings)
    if not found:
        return [Check("shared memory", CheckVerdict.OK, shared_memory_line(found, why))]
    return [
        Check(
            f"shared memory, {node}",
            CheckVerdict.WARNING,
            f"no: {reason}",
            "docs/sharing.md says how other users and containers are let in",
        )
        if reason
        else Check(f"shared memory, {node}", CheckVerdict.OK, "yes")
        for node, reason in sorted(found.items())
    ]


def are_well(found: Iterable[Check]) -> bool:
    """Whether nothing is wrong that keeps a cluster from working."""
    return all(check.verdict is not CheckVerdict.WRONG for check in found)
