"""Kinds of faults that are injected into a site, drawn at random, each with its victims.

A fault ends when its effect is undone: killed processes run again, partitions are healed. It records when it took effect.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.faults import devices
from tests.faults.moves import COMBINATIONS, Moves
from tests.faults.points import POINTS
from tests.faults.site import CLIENTS, SERVERS, TASKED, Site

PAUSE_S: Final = 0.3
"""Pause before a killed process is started again."""
CUT_S: Final = (0.5, 3.0)
"""Duration of a partition or of a vanished host, in lease times."""
DEVICE_S: Final = 2.0
SYNC_S: Final = (0.05, 0.5)
STOPS: Final = (0.5, 0.9, 1.1, 3.0)
"""Lease times for which a process is stopped."""
POINT_S: Final = 5.0
"""Time within which a process must reach a fail point."""
HELD_S: Final = (0.01, 0.3)
SIGNALS: Final = 10
"""Signals of one fault that interrupts a client."""
NOT_BY_LOAD: Final = ("drain", "register", "takeover", "inventory", "OpenIndex", "MapSlabs", "ReleaseLeases", "Nodes")
"""Points that the clients' load does not reach."""


@dataclass(slots=True)
class Told:
    """Result of a fault."""

    struck_ns: int = 0
    """Time at which it took effect; 0: no effect, since its victim never reached the fail point."""
    lost: list[int] = field(default_factory=list)
    """Nodes that lost their memory, or may have dropped blocks of a device that failed."""
    stopped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Clients, each with the interval during which it was stopped."""

    def strike(self) -> None:
        self.struck_ns = time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Fault:
    """`victims` are names of processes, "host0", or "etcd" for a fault that makes an etcd member unreachable.

    Concurrent faults have no victim in common."""

    kind: str
    text: str
    victims: frozenset[str]
    run: Callable[[Told], None]


Maker = Callable[[Site, random.Random], Fault]


def _killed(site: Site, name: str, told: Told) -> None:
    if name[0] == "n":
        told.lost.append(int(name[1:]))
    site.kill(name)


def _victims(name: str) -> frozenset[str]:
    return frozenset({name, "etcd"} if name[0] == "e" else {name})


def killed(site: Site, choose: random.Random) -> Fault:
    """SIGKILL, then a restart."""
    name = _any(choose)

    def run(told: Told) -> None:
        told.strike()
        _killed(site, name, told)
        time.sleep(PAUSE_S)
        site.start(name)

    return Fault(f"{ROLES[name[0]]} killed", name, _victims(name), run)


def at_a_point(site: Site, choose: random.Random) -> Fault:
    """SIGKILL that the process sends to itself at a fail point."""
    name = _any(choose, "mnc")
    if name[0] == "m":
        name = site.owner() or name  # the other masters serve no clients
    role = ROLES[name[0]]
    if name[0] == "c" and int(name[1:]) in TASKED:  # its connections are of another class
        return killed(site, choose)
    point = choose.choice([one for one in POINTS if one.startswith(role) and not any(f".{part}" in one for part in NOT_BY_LOAD)])

    def run(told: Told) -> None:
        site.points[name].arm(f"{point}=kill:{choose.randrange(1, 20)}")
        try:
            if not site.await_end(name, POINT_S):
                site.points[name].disarm()
                end_s = time.monotonic() + POINT_S
                while not (site.points[name].is_armed or site.points[name].struck) and time.monotonic() < end_s:
                    time.sleep(0.02)
            if site.points[name].struck:
                told.strike()
                site.await_end(name, POINT_S)
                _killed(site, name, told)
        finally:
            site.points[name].disarm()
        if told.struck_ns:
            site.start(name)

    return Fault(f"{role} killed at a fail point", f"{name} at {point}", _victims(name), run)


def held_up(site: Site, choose: random.Random) -> Fault:
    """Delay every thread of a daemon that reaches a fail point, so that events that are usually close together are far apart."""
    name, delay_s = _any(choose, "mn"), choose.uniform(*HELD_S)
    if name[0] == "m":
        name = site.owner() or name
    point = choose.choice([one for one in POINTS if one.startswith(ROLES[name[0]])])

    def run(told: Told) -> None:
        site.points[name].arm(f"{point}=delay:{delay_s:.3f}")
        time.sleep(DEVICE_S)
        if site.points[name].struck:
            told.strike()
        site.points[name].disarm()

    return Fault(f"{ROLES[name[0]]} held up at a fail point", f"{name} at {point} by {delay_s:.2f} s", _victims(name), run)


def stopped(site: Site, choose: random.Random) -> Fault:
    """SIGSTOP, for about a lease time."""
    name, factor = _any(choose), choose.choice(STOPS)

    def run(told: Told) -> None:
        told.strike()
        site.signal(name, signal.SIGSTOP)
        time.sleep(factor * site.lease_s)
        site.signal(name, signal.SIGCONT)
        if name[0] == "c":
            told.stopped[int(name[1:])] = (told.struck_ns, time.monotonic_ns())

    return Fault(f"{ROLES[name[0]]} stopped", f"{name} for {factor} lease times", _victims(name), run)


def partition(site: Site, choose: random.Random) -> Fault:
    """Between two hosts, one way or both."""
    a, b = choose.sample(range(SERVERS + 1), 2)
    is_one_way = choose.random() < 0.5
    ways = [(a, b)] if is_one_way else [(a, b), (b, a)]
    lasts_s = choose.uniform(*CUT_S) * site.lease_s

    def run(told: Told) -> None:
        site.hosts.cut(ways)
        told.strike()
        time.sleep(lasts_s)
        site.hosts.mend(ways)

    kind = "partition, one way" if is_one_way else "partition, both ways"
    return Fault(kind, f"host {a} to {b} for {lasts_s:.1f} s", frozenset({f"host{a}", f"host{b}", "etcd"}), run)


def vanished(site: Site, choose: random.Random) -> Fault:
    """A host disappears without closing connections, and returns with no process running."""
    host = choose.randrange(SERVERS)
    names = [name for name in site.names if site.host(name) == host]
    lasts_s = choose.uniform(*CUT_S) * site.lease_s

    def run(told: Told) -> None:
        site.hosts.cut(site.hosts.ways(host))
        told.strike()
        for name in names:
            _killed(site, name, told)
        time.sleep(lasts_s)
        site.hosts.mend(site.hosts.ways(host))
        for name in names:
            site.start(name)

    return Fault("host vanished", f"host {host} for {lasts_s:.1f} s", frozenset({*names, f"host{host}", "etcd"}), run)


def slow_disk(site: Site, choose: random.Random) -> Fault:
    """Every sync to disk of an etcd member or a node is delayed."""
    name, delay_s = _any(choose, "en"), choose.uniform(*SYNC_S)
    file = None if name[0] == "e" else _nvme(site, name, choose)

    def run(told: Told) -> None:
        with devices.slow_syncs(site.pid(name), file, delay_s):
            told.strike()
            time.sleep(DEVICE_S)

    return Fault(f"{ROLES[name[0]]}'s disk slow", f"{name} by {delay_s:.2f} s", _victims(name), run)


def full_disk(site: Site, choose: random.Random) -> Fault:
    """A node's NVMe has no free space for DEVICE_S."""
    name = _any(choose, "n")
    file = _nvme(site, name, choose)

    def run(told: Told) -> None:
        told.lost.append(int(name[1:]))  # blocks that cannot be demoted may be evicted meanwhile
        with devices.refusing_writes(site.pid(name), file, "ENOSPC", when=f"{choose.randrange(1, 4)}+"):
            told.strike()
            time.sleep(DEVICE_S)
        told.lost.append(int(name[1:]))

    return Fault("node's disk full", name, _victims(name), run)


def broken_disk(site: Site, choose: random.Random) -> Fault:
    """A node's NVMe fails at one write, or from one on. The tier may be disabled for good then, and the node is restarted."""
    name, number = _any(choose, "n"), choose.randrange(1, 4)
    when = choose.choice((f"{number}", f"{number}+"))
    file = _nvme(site, name, choose)

    def run(told: Told) -> None:
        told.lost.append(int(name[1:]))
        with devices.refusing_writes(site.pid(name), file, "EIO", when=when):
            told.strike()
            time.sleep(DEVICE_S)
        _killed(site, name, told)
        site.start(name)

    return Fault("node's disk broken", f"{name} at write {when}", _victims(name), run)


def interrupted(site: Site, choose: random.Random) -> Fault:
    """A client's signal handler raises during an operation, or its task is cancelled, SIGNALS times."""
    name = _any(choose, "c")

    def run(told: Told) -> None:
        told.strike()
        for _ in range(SIGNALS):
            site.signal(name, signal.SIGUSR1)
            time.sleep(choose.uniform(0.01, 0.1))

    return Fault("client interrupted", name, _victims(name), run)


def forked(site: Site, choose: random.Random) -> Fault:
    """A client forks during an operation, and its child sends a request."""
    name = _any(choose, "c")

    def run(told: Told) -> None:
        told.strike()
        site.signal(name, signal.SIGUSR2)
        time.sleep(PAUSE_S)

    return Fault("client forked", name, _victims(name), run)


def moving(site: Site, choose: random.Random) -> Fault:
    """A node dies, hangs or is filled while blocks move: see moves.py. All combinations in turn."""
    where, how = COMBINATIONS[len(site.moved) % len(COMBINATIONS)]
    source = choose.randrange(SERVERS)

    def run(told: Told) -> None:
        Moves(site, where, how, source).run(told.strike, lambda name: _killed(site, name, told))

    victims = {*(f"n{node}" for node in range(SERVERS)), *(f"host{host}" for host in range(SERVERS + 1))}
    return Fault(f"blocks move, {where} {how}", f"source n{source}", frozenset(victims), run)


ROLES: Final = {"e": "etcd", "m": "master", "n": "node", "c": "client"}
COUNTS: Final = {"e": SERVERS, "m": SERVERS, "n": SERVERS, "c": CLIENTS}
MAKERS: Final[dict[str, tuple[int, Maker]]] = {
    "killed": (6, killed),
    "point": (5, at_a_point),
    "held": (3, held_up),
    "stopped": (5, stopped),
    "partition": (3, partition),
    "vanished": (1, vanished),
    "slow": (2, slow_disk),
    "full": (1, full_disk),
    "broken": (1, broken_disk),
    "interrupted": (2, interrupted),
    "forked": (1, forked),
    "moving": (6, moving),
}
"""By name: its weight in the draw, and its maker."""
_DEVICES: Final = ("slow", "full", "broken")


def draw(site: Site, choose: random.Random, names: list[str]) -> Fault:
    """Return a random fault of these kinds."""
    [name] = choose.choices(names, [MAKERS[name][0] for name in names])
    return MAKERS[name][1](site, choose)


def possible() -> list[str]:
    """Return the kinds that this machine can inject."""
    return [name for name in MAKERS if name not in _DEVICES or not devices.why_not()]


def _any(choose: random.Random, roles: str = "emnc") -> str:
    """Return the name of a random process; each role is equally likely."""
    role = choose.choice(roles)
    return f"{role}{choose.randrange(COUNTS[role])}"


def _nvme(site: Site, name: str, choose: random.Random) -> Path:
    """Return the file of values or that of their records, at random."""
    return site.folder / name / "nvme" / choose.choice(("values", "data.mdb"))
