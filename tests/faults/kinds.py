"""What is done to a site: kinds of faults, of each of which one is drawn at random, with its victims.

A fault is over when what it did is undone: what was killed runs again, what was cut is mended. It says when it struck.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.faults import devices
from tests.faults.points import POINTS
from tests.faults.site import CLIENTS, SERVERS, TASKED, Site

PAUSE_S: Final = 0.3
"""Before what was killed is started again."""
CUT_S: Final = (0.5, 3.0)
"""How long a partition or a vanished host lasts, in lease times."""
DEVICE_S: Final = 2.0
SYNC_S: Final = (0.05, 0.5)
STOPS: Final = (0.5, 0.9, 1.1, 3.0)
"""Lease times for which a process is stopped."""
POINT_S: Final = 5.0
"""How long a process has to come to a fail point."""
HELD_S: Final = (0.01, 0.3)
SIGNALS: Final = 10
"""Of one fault that interrupts a client."""
NOT_BY_LOAD: Final = ("drain", "register", "takeover", "inventory", "OpenIndex", "MapSlabs", "ReleaseLeases", "Nodes")
"""Points that the clients' load does not lead to."""


@dataclass(slots=True)
class Told:
    """What became of a fault."""

    struck_ns: int = 0
    """When it had its effect; 0: it had none, for its victim never came to the point at which it was to die."""
    lost: list[int] = field(default_factory=list)
    """Nodes that lost what only their memory held, or may have given up blocks of a device that failed."""
    stopped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Clients, and when they could not run."""

    def strike(self) -> None:
        self.struck_ns = time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Fault:
    """`victims` are names of processes, "host0", "etcd" for anything that takes a member away: no two faults at once have one in common."""

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
    """SIGKILL, and started again."""
    name = _any(choose)

    def run(told: Told) -> None:
        told.strike()
        _killed(site, name, told)
        time.sleep(PAUSE_S)
        site.start(name)

    return Fault(f"{ROLES[name[0]]} killed", name, _victims(name), run)


def at_a_point(site: Site, choose: random.Random) -> Fault:
    """Killed by itself at a fail point."""
    name = _any(choose, "mnc")
    if name[0] == "m":
        name = site.owner() or name  # the others serve nobody
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
    """Whoever comes to a fail point in a daemon waits there, each time, so that what is otherwise close together is far apart."""
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
    """SIGSTOP, for around a lease time."""
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
    """A host is gone without a word, and comes back with nothing running on it."""
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
    """Whatever a member of etcd or a node makes durable takes its time."""
    name, delay_s = _any(choose, "en"), choose.uniform(*SYNC_S)
    file = None if name[0] == "e" else _nvme(site, name, choose)

    def run(told: Told) -> None:
        with devices.slow_syncs(site.pid(name), file, delay_s):
            told.strike()
            time.sleep(DEVICE_S)

    return Fault(f"{ROLES[name[0]]}'s disk slow", f"{name} by {delay_s:.2f} s", _victims(name), run)


def full_disk(site: Site, choose: random.Random) -> Fault:
    """A node's NVMe has no room, for a while."""
    name = _any(choose, "n")
    file = _nvme(site, name, choose)

    def run(told: Told) -> None:
        told.lost.append(int(name[1:]))  # what has no room further down may leave meanwhile
        with devices.refusing_writes(site.pid(name), file, "ENOSPC", when=f"{choose.randrange(1, 4)}+"):
            told.strike()
            time.sleep(DEVICE_S)
        told.lost.append(int(name[1:]))

    return Fault("node's disk full", name, _victims(name), run)


def broken_disk(site: Site, choose: random.Random) -> Fault:
    """A node's NVMe fails at one write, or from one on; it may be given up for good then, and the node is replaced."""
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
    """A client's handler raises in the middle of what it does, or its task is cancelled, a few times."""
    name = _any(choose, "c")

    def run(told: Told) -> None:
        told.strike()
        for _ in range(SIGNALS):
            site.signal(name, signal.SIGUSR1)
            time.sleep(choose.uniform(0.01, 0.1))

    return Fault("client interrupted", name, _victims(name), run)


def forked(site: Site, choose: random.Random) -> Fault:
    """A client forks in the middle of what it does, and its child asks."""
    name = _any(choose, "c")

    def run(told: Told) -> None:
        told.strike()
        site.signal(name, signal.SIGUSR2)
        time.sleep(PAUSE_S)

    return Fault("client forked", name, _victims(name), run)


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
}
"""By name: how often it is drawn, and what makes it."""
_DEVICES: Final = ("slow", "full", "broken")


def draw(site: Site, choose: random.Random, names: list[str]) -> Fault:
    """Of these kinds."""
    [name] = choose.choices(names, [MAKERS[name][0] for name in names])
    return MAKERS[name][1](site, choose)


def possible() -> list[str]:
    """The kinds that can be made here."""
    return [name for name in MAKERS if name not in _DEVICES or not devices.why_not()]


def _any(choose: random.Random, roles: str = "emnc") -> str:
    """A process: each role as often as the others."""
    role = choose.choice(roles)
    return f"{role}{choose.randrange(COUNTS[role])}"


def _nvme(site: Site, name: str, choose: random.Random) -> Path:
    """Of values or of their headers."""
    return site.folder / name / "nvme" / choose.choice(("values", "data.mdb"))
