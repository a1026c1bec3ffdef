"""Banners of the console: each trouble of a cluster, since when, and what to do. Sans-I/O: the time is passed in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb

INFO: Final = "info"
WARNING: Final = "warning"
"""Degraded: all requests are still served."""
ERROR: Final = "error"
"""Data or service is lost until an operator acts."""

MAX_NAMED: Final = 5
"""Nodes that a banner names; of more it gives the number."""
MAX_HEALTH: Final = 160
"""Characters of a catalog's health shown at once. More is folded away as `detail`."""
SILENT: Final = "does not answer"
"""Separates the name of a silent master from the reason, in a line of what is missing."""


@dataclass(frozen=True, slots=True)
class Banner:
    """One thing that an operator should know.

    `kind` names the trouble from look to look. `view` is the part of the page that shows it, `detail` the raw text of the program that
    reported it. `age_s` is how long it has lasted, None where the status does not have it.
    """

    level: str
    kind: str
    text: str
    todo: str
    view: str
    detail: str = ""
    age_s: float | None = None


class Banners:
    """Troubles with the time since when each is known. Not thread-safe."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[float, bool]] = {}
        """By kind: time of day, and whether the trouble may be older."""
        self._is_first = True

    def of(self, troubles: Iterable[Banner], wall_s: float) -> list[dict[str, Any]]:
        """Return one object for each trouble, the worst first: its fields, `since_s` (Unix time), and `is_older`.

        `is_older` is true for a trouble that was there at the first look and whose age nothing reports.
        """
        found = sorted(troubles, key=lambda one: one.level != ERROR)
        before, self._since_s = self._since_s, {}
        for one in found:
            known = before.get(one.kind) or (wall_s, self._is_first)
            if one.age_s is not None and one.age_s > 0:
                known = (min(known[0], wall_s - one.age_s), False)
            self._since_s[one.kind] = known
        self._is_first = False
        return [_object(one, *self._since_s[one.kind]) for one in found]


def _object(trouble: Banner, since_s: float, is_older: bool) -> dict[str, Any]:
    fields = asdict(trouble)
    del fields["age_s"]
    return {**fields, "since_s": round(since_s, 1), "is_older": is_older}


def unreachable(failure: str) -> Banner:
    """The trouble of a console that no master answers."""
    todo = "Check that a master runs and that this console reaches it: kvstore status. The console asks again by itself."
    return Banner(ERROR, "unreachable", f"The cluster does not answer: {failure}", todo, "activity")


def troubles(status: pb.StatusReply, missing: Sequence[str], shares: Mapping[str, int]) -> list[Banner]:
    """Return what is wrong with a cluster. `missing` are the masters that did not answer, a line each, `shares` partitions by master."""
    return [*map(_silent, missing), *_of_masters(status, shares), *_of_catalog(status), *_of_nodes(status), *_of_endings(status)]


def _silent(line: str) -> Banner:
    name, is_silent, why = line.partition(SILENT)
    todo = "Check that this master runs and that the others reach it. What it owns goes to another one when its lease ends."
    return Banner(ERROR, f"silent {name}", f"{name}{is_silent}", todo, "overview", detail=why.strip(" :;"))


def _of_masters(status: pb.StatusReply, shares: Mapping[str, int]) -> Iterator[Banner]:
    """Masters that cannot own the catalog. Where the catalog itself is in trouble its banner has the cause, and these are left out."""
    if _is_well(status) and status.role == "following" and not status.owner.name:
        todo = "Reads go on; puts, pins and drains wait. Check that etcd has a quorum and that the masters run: kvstore status."
        yield Banner(ERROR, "no owner", "No master owns the catalog", todo, "activity")
    elif _is_well(status) and status.role == "cut off":
        todo = "Another master may own it by now. Check the network between this master and its catalog."
        yield Banner(ERROR, "cut off", "This master is cut off from its catalog", todo, "activity")
    lost = status.partitions - sum(shares.values()) if status.partitions > 1 and status.owners else 0
    if lost:
        todo = "Their keys are misses, and cannot be put. Start the masters that are missing: kvstore status names those that run."
        yield Banner(ERROR, "unowned", f"No master owns {lost} of the {status.partitions} partitions", todo, "activity")


def _of_catalog(status: pb.StatusReply) -> Iterator[Banner]:
    if _is_well(status):
        return
    first, _semicolon, rest = status.catalog_health.partition(";")
    is_long = len(first) > MAX_HEALTH
    text = f"Catalog: {first[:MAX_HEALTH].rsplit(' ', 1)[0]}…" if is_long else f"Catalog: {first}"
    yield Banner(ERROR, "catalog", text, _catalog_todo(status), "overview", detail=status.catalog_health if is_long or rest else "")


def _is_well(status: pb.StatusReply) -> bool:
    return status.catalog_health in ("", "ok")


def _catalog_todo(status: pb.StatusReply) -> str:
    if "NOSPACE" in status.catalog_health:
        return "Reads go on; puts are not confirmed. Compact and defragment etcd: docs/operations.md, etcd is full."
    if status.catalog.startswith("etcd:"):
        return "Reads go on; puts are not confirmed. Check that most members of etcd run: etcdctl endpoint health."
    return "Reads go on; puts are not confirmed. Check the disk of the master that owns the catalog."


def _of_nodes(status: pb.StatusReply) -> Iterator[Banner]:
    dead = [node for node in status.nodes if node.state == "dead"]
    if dead:
        todo = "Blocks that only it had are misses. Start it again with its NVMe folder, or forget it if it is gone for good."
        if len(dead) > 1:
            todo = "Blocks that only they had are misses. Start them again with their NVMe folders, or forget those that are gone for good."
        age_s = max(node.heartbeat_age_s for node in dead)
        yield Banner(ERROR, "dead", f"{_named([node.name for node in dead])} dead", todo, "nodes?state=dead", age_s=age_s)
    failed = [(node.name, health) for node in status.nodes if node.state in ("alive", "syncing") and (health := tier_health(node))]
    if failed:
        name, health = failed[0]
        others = {1: "", 2: f", and of {failed[-1][0]},"}.get(len(failed), f", and of {len(failed) - 1} more nodes,")
        text = f"A tier of {name}{others} failed: {health}"
        todo = "The nodes go on with their other tiers. Replace the device: docs/operations.md, A disk died."
        yield Banner(WARNING, "failed tier", text, todo, "nodes?state=failed")
    stuck = [node.name for node in status.nodes if node.drain.lacks_space and node.drain.remaining_blocks]
    if stuck:
        todo = "Start another node, or end the drain. Stopping the node now loses these blocks."
        yield Banner(WARNING, "stuck drain", f"No node has room for the rest of {stuck[0]}'s drain", todo, "nodes?state=draining")
    if status.role not in ("", "following") and not status.nodes:
        yield Banner(WARNING, "no node", "No node has joined yet", "Start one: kvstore-node --master HOST:PORT", "nodes")


def _of_endings(status: pb.StatusReply) -> Iterator[Banner]:
    for one in sorted(status.expirations, key=lambda ending: ending.left_s):
        is_over = one.left_s <= 0
        when = "has ended" if is_over else f"ends in {_days(one.left_s)}"
        is_token = one.what.startswith("token")
        todo = "Make another one, hand it out, and take the old one out: docs/security.md, Rotation."
        if not is_token:
            todo = "Put a new one in its place: it is read again without a restart (docs/security.md, TLS)."
        what = f"{one.what[:1].upper()}{one.what[1:]}{'' if is_token else f' of {status.name}'}"
        yield Banner(ERROR if is_over else WARNING, f"ends {one.what}", f"{what} {when}", todo, "overview")


def _days(seconds: float) -> str:
    days, hours = divmod(int(seconds) // 3600, 24)
    return f"{days} days" if days > 1 else f"{24 * days + hours} hours"


def tier_health(node: pb.NodeStatus) -> str:
    """Return the tiers of a node that failed, with the reasons; "" for none."""
    return "; ".join(f"{tier.name}: {tier.health}" for tier in node.tiers if tier.health not in ("", "ok"))


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} nodes ({', '.join(sorted(names)[:MAX_NAMED])}{more}) are"
