"""Banners of the console: the problems of a cluster, their begin and advice. Sans-I/O: the time is passed in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import SUSPENDED

INFO: Final = "info"
WARNING: Final = "warning"
"""All requests are still served."""
ERROR: Final = "error"
"""Data or service is lost until an operator acts."""

MAX_NAMED: Final = 5
"""Most node names in a banner; further nodes are counted."""
MAX_HEALTH: Final = 160
"""Most characters of a catalog's health in a banner's text; the whole is in `detail`."""
SILENT: Final = "does not answer"
"""Separates a master's name from the reason in the lines of `ClusterSnapshot.missing`."""


@dataclass(frozen=True, slots=True)
class Banner:
    """A problem of the cluster.

    `kind` identifies the problem across polls. `todo` is advice, `view` the page's view that shows more, `detail` the raw text as
    reported. `age_s` is how long it has lasted, None if the status does not have it.
    """

    level: str
    kind: str
    text: str
    todo: str
    view: str
    detail: str = ""
    age_s: float | None = None


class Banners:
    """Tracks since when each problem has lasted. Not thread-safe."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[float, bool]] = {}
        """Kind -> Unix time, and whether the problem may be older."""
        self._is_first = True

    def of(self, problems: Iterable[Banner], wall_s: float) -> list[dict[str, Any]]:
        """Return one JSON object per problem, errors first: its fields, `since_s` (Unix time), and `is_older`.

        `is_older` marks problems that existed at the first poll and have no reported age.
        """
        found = sorted(problems, key=lambda one: one.level != ERROR)
        before, self._since_s = self._since_s, {}
        for one in found:
            known = before.get(one.kind) or (wall_s, self._is_first)
            if one.age_s is not None and one.age_s > 0:
                known = (min(known[0], wall_s - one.age_s), False)
            self._since_s[one.kind] = known
        self._is_first = False
        return [_object(one, *self._since_s[one.kind]) for one in found]


def _object(problem: Banner, since_s: float, is_older: bool) -> dict[str, Any]:
    fields = asdict(problem)
    del fields["age_s"]
    return {**fields, "since_s": round(since_s, 1), "is_older": is_older}


def unreachable(failure: str) -> Banner:
    """Return the banner of a console that cannot reach a master."""
    todo = "Check that a master runs and that this console can reach it: kvstore status. The console keeps trying."
    return Banner(ERROR, "unreachable", f"The cluster does not answer: {failure}", todo, "activity")


def find_banners(status: pb.StatusReply, missing: Sequence[str], shares: Mapping[str, int]) -> list[Banner]:
    """Return the problems of a cluster. `missing`: a line per master that did not respond; `shares`: partitions by master."""
    return [*map(_silent, missing), *_of_masters(status, shares), *_of_catalog(status), *_of_nodes(status), *_of_endings(status)]


def _silent(line: str) -> Banner:
    name, is_silent, why = line.partition(SILENT)
    todo = "Check that this master runs and that the others can reach it. Another master takes over when its lease expires."
    return Banner(ERROR, f"silent {name}", f"{name}{is_silent}", todo, "overview", detail=why.strip(" :;"))


def _of_masters(status: pb.StatusReply, shares: Mapping[str, int]) -> Iterator[Banner]:
    """Problems of ownership. An unhealthy catalog is their cause and has a banner of its own, so they are left out then."""
    if _is_healthy(status) and status.role == "following" and not status.owner.name:
        todo = "Reads continue; puts, pins and drains wait. Check that etcd has a quorum and that the masters run: kvstore status."
        yield Banner(ERROR, "no owner", "No master owns the catalog", todo, "activity")
    elif _is_healthy(status) and status.role == "cut off":
        todo = "Another master may own it by now. Check the network between this master and its catalog."
        yield Banner(ERROR, "cut off", "This master is cut off from its catalog", todo, "activity")
    lost = status.partitions - sum(shares.values()) if status.partitions > 1 and status.owners else 0
    if lost:
        todo = "Their keys are misses, and puts fail. Start the missing masters: kvstore status shows those that run."
        yield Banner(ERROR, "unowned", f"No master owns {lost} of the {status.partitions} partitions", todo, "activity")


def _of_catalog(status: pb.StatusReply) -> Iterator[Banner]:
    if _is_healthy(status):
        return
    first, _semicolon, rest = status.catalog_health.partition(";")
    is_long = len(first) > MAX_HEALTH
    text = f"Catalog: {first[:MAX_HEALTH].rsplit(' ', 1)[0]}…" if is_long else f"Catalog: {first}"
    yield Banner(ERROR, "catalog", text, _catalog_todo(status), "overview", detail=status.catalog_health if is_long or rest else "")


def _is_healthy(status: pb.StatusReply) -> bool:
    return status.catalog_health in ("", "ok")


def _catalog_todo(status: pb.StatusReply) -> str:
    if "NOSPACE" in status.catalog_health:
        return "Reads continue; puts are not confirmed. Compact and defragment etcd: docs/operations.md, etcd is full."
    if status.catalog.startswith("etcd:"):
        return "Reads continue; puts are not confirmed. Check that most members of etcd run: etcdctl endpoint health."
    return "Reads continue; puts are not confirmed. Check the disk of the master that owns the catalog."


def _of_nodes(status: pb.StatusReply) -> Iterator[Banner]:
    dead = [node for node in status.nodes if node.state == "dead"]
    if dead:
        todo = "Its last replicas are misses. Start it again with its NVMe folder, or forget it if it will not return."
        if len(dead) > 1:
            todo = "Their last replicas are misses. Start them again with their NVMe folders, or forget those that will not return."
        age_s = max(node.heartbeat_age_s for node in dead)
        yield Banner(ERROR, "dead", f"{_named([node.name for node in dead])} dead", todo, "nodes?state=dead", age_s=age_s)
    yield from _of_tiers(status)
    stuck = [node.name for node in status.nodes if node.drain.lacks_space and node.drain.remaining_blocks]
    if stuck:
        todo = "Start another node, or end the drain. Stopping the node now loses these blocks."
        yield Banner(WARNING, "stuck drain", f"No node has free space for the rest of {stuck[0]}'s drain", todo, "nodes?state=draining")
    if status.role not in ("", "following") and not status.nodes:
        yield Banner(WARNING, "no node", "No node has joined yet", "Start one: kvstore-node --master HOST:PORT", "nodes")


def _of_tiers(status: pb.StatusReply) -> Iterator[Banner]:
    found = [(node.name, health) for node in status.nodes if node.state in ("alive", "syncing") and (health := tier_health(node))]
    full = [(name, health) for name, health in found if SUSPENDED in health]
    failed = [one for one in found if one not in full]
    if failed:
        todo = "The nodes continue with their other tiers. Replace the device: docs/operations.md, A disk died."
        yield Banner(WARNING, "failed tier", f"A tier of {_first(failed)} failed: {failed[0][1]}", todo, "nodes?state=failed")
    if full:
        todo = "Its blocks can be read; what it does not take is evicted. Writes are tried again every few seconds."
        yield Banner(WARNING, "suspended tier", f"A tier of {_first(full)} takes no values: {full[0][1]}", todo, "nodes?state=failed")


def _first(found: Sequence[tuple[str, str]]) -> str:
    """Name of the first node, and the number of the others."""
    return found[0][0] + {1: "", 2: f", and of {found[-1][0]},"}.get(len(found), f", and of {len(found) - 1} more nodes,")


def _of_endings(status: pb.StatusReply) -> Iterator[Banner]:
    for one in sorted(status.expirations, key=lambda ending: ending.left_s):
        is_over = one.left_s <= 0
        when = "has expired" if is_over else f"expires in {_days(one.left_s)}"
        is_token = one.what.startswith("token")
        todo = "Create a new one, distribute it, and remove the old one: docs/security.md, Rotation."
        if not is_token:
            todo = "Replace the file: it is reloaded without a restart (docs/security.md, TLS)."
        what = f"{one.what[:1].upper()}{one.what[1:]}{'' if is_token else f' of {status.name}'}"
        yield Banner(ERROR if is_over else WARNING, f"ends {one.what}", f"{what} {when}", todo, "overview")


def _days(seconds: float) -> str:
    days, hours = divmod(int(seconds) // 3600, 24)
    return f"{days} days" if days > 1 else f"{24 * days + hours} hours"


def tier_health(node: pb.NodeStatus) -> str:
    """Return the failed tiers of a node with the reasons; "" for none."""
    return "; ".join(f"{tier.name}: {tier.health}" for tier in node.tiers if tier.health not in ("", "ok"))


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} nodes ({', '.join(sorted(names)[:MAX_NAMED])}{more}) are"
