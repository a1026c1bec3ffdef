"""Chaos: a whole cluster of real processes under load, and every few seconds a fault that a seed draws. `make chaos`.

    python -m tests.faults.chaos --minutes 5 --seed 1

What clients saw is judged by their journals (judging.py); memory and descriptors of the daemons are to be at the end what they were at
the beginning. Exit status 1: something happened that may not. Needs root, for hosts of its own on this machine (hosts.py).
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError
from tests.faults import kinds
from tests.faults.beside import meanwhile
from tests.faults.hosts import StarHosts
from tests.faults.journal import Act, BlockName, Journal, Outcome, read
from tests.faults.judging import Circumstances, Judge, Times, Verdict
from tests.faults.reporting import Done, Report, daemons_changed, printed
from tests.faults.resting import Rest, unprovoked
from tests.faults.site import CLIENTS, SERVERS, TENANT, TOKEN, Site, epochs, settled
from tests.namespaces import why_not
from tests.system.history import version_of

OUT: Final = Path("benchmarks/out/chaos.json")
WARM_UP_S: Final = 3.0
MAX_AT_ONCE: Final = 2
QUIET_EVERY: Final = 8
"""Faults between two quiet periods. In a quiet period the site recovers fully, and lost blocks become visible."""
QUIET_S: Final = 2.0
SETTLE_S: Final = 60.0
LOOK_S: Final = 0.1
GRACE_S: Final = 2.0
"""By how much a call may miss its deadline, where processes compete for a few cores."""
SWEEP_BLOCKS: Final = 64
MAX_SWEPT: Final = 200_000
SWEEPER: Final = CLIENTS + 1


@dataclass(slots=True)
class Seen:
    """Faults that were injected, and the site's state meanwhile. Threads append."""

    faults: list[Done] = field(default_factory=list)
    lost: dict[int, list[int]] = field(default_factory=lambda: {node: [] for node in range(SERVERS)})
    stopped: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {client: [] for client in range(CLIENTS)})
    disturbed: list[tuple[int, int]] = field(default_factory=list)
    unprovoked: int = 0
    """Number of times the site was not at rest without a fault."""
    trouble: list[str] = field(default_factory=list)
    """Faults that failed themselves, and sites that did not recover."""


class Chaos:
    def __init__(self, site: Site, seed: int, *, every_s: float, names: list[str]) -> None:
        self._site = site
        self._choose = random.Random(seed)
        self._every_s = every_s
        self._names = names
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._evictions: dict[str, int] = {}
        """By node, at the last look."""
        self._watched_ns = time.monotonic_ns()
        self._rest = Rest()
        self.seen = Seen()

    def run(self, seconds: float) -> None:
        """Faults for so long, each in a thread of its own; returns when all is at rest."""
        end_s = time.monotonic() + seconds
        threads: list[threading.Thread] = []
        with meanwhile(self._watch, every_s=LOOK_S):
            while time.monotonic() < end_s:
                next_s = time.monotonic() + self._every_s
                threads = [thread for thread in threads if thread.is_alive()]
                fault = self._draw() if len(threads) < MAX_AT_ONCE else None
                if fault is not None:
                    threads.append(threading.Thread(target=self._strike, args=(fault,)))
                    threads[-1].start()
                    if len(self.seen.faults) % QUIET_EVERY == QUIET_EVERY - 1:
                        self._join(threads)
                        time.sleep(QUIET_S)
                time.sleep(max(0.0, next_s - time.monotonic()))
            self._join(threads)
        self.seen.unprovoked = unprovoked(self._rest.disturbed, self.seen.disturbed)
        self.seen.disturbed += self._rest.disturbed

    def _draw(self) -> kinds.Fault | None:
        """One whose victims no other is at; None: none is found."""
        for _ in range(20):
            fault = kinds.draw(self._site, self._choose, self._names)
            with self._lock:
                if not fault.victims & self._busy:
                    self._busy |= fault.victims
                    return fault
        return None

    def _strike(self, fault: kinds.Fault) -> None:
        told, began_ns = kinds.Told(), time.monotonic_ns()
        seen = self.seen
        try:
            fault.run(told)
        except Exception as error:
            seen.trouble.append(f"{fault.kind} ({fault.text}): {type(error).__name__}: {error}")
        healed_ns = time.monotonic_ns()
        if not self.come_to_rest():
            seen.trouble.append(f"not at rest {SETTLE_S:g} s after {fault.kind} ({fault.text})")
        over_ns = time.monotonic_ns()
        with self._lock:
            self._busy -= fault.victims
            seen.disturbed.append((began_ns, over_ns))
            seen.faults.append(Done(fault.kind, fault.text, began_ns, told.struck_ns, healed_ns, over_ns))
            for node in told.lost:
                seen.lost[node] += [began_ns, told.struck_ns or began_ns, healed_ns]
            for client, interval in told.stopped.items():
                seen.stopped[client].append(interval)
        line = f"{(began_ns - _BEGAN_NS) / 1e9:7.1f} s  {fault.kind}: {fault.text}; at rest after {(over_ns - began_ns) / 1e9:.1f} s"
        sys.stdout.write(line + "\n")  # in one write: faults' threads share it
        sys.stdout.flush()

    def come_to_rest(self) -> bool:
        """The owner says so twice, half a lease time apart: what it says is as old as the last heartbeats."""
        end_s, since_s = time.monotonic() + SETTLE_S, None
        while time.monotonic() < end_s:
            is_settled = settled(self._site.status())
            since_s = (since_s or time.monotonic()) if is_settled else None
            if since_s is not None and time.monotonic() - since_s > self._site.lease_s / 2:
                return True
            time.sleep(LOOK_S)
        return False

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()

    def _watch(self) -> None:
        """Note when nodes have evicted blocks: these are not lost, but gone. And when the site is not at rest."""
        began_ns = time.monotonic_ns()
        status, now_ns = self._site.status(), time.monotonic_ns()
        self._rest.looked(began_ns, now_ns, epochs(status) if status is not None and settled(status) else None)
        for node in status.nodes if status is not None else ():
            count = sum(tier.evictions for tier in node.tiers)
            if count not in (0, self._evictions.get(node.name, 0)):  # fewer: of the process that came after
                late_ns = int(self._site.lease_s * 1e9)  # a heartbeat reports evictions before it
                self.seen.lost[int(node.name[1:])] += [self._watched_ns - late_ns, self._watched_ns, now_ns]
            self._evictions[node.name] = count
        self._watched_ns = now_ns


def sweep(site: Site, journals: list[tuple[int, Any]]) -> None:
    """Read once more what was ever put, now that all is quiet: what is left must be there, and what was removed must not."""
    blocks = sorted({row for _, records in journals for row in records["key"][records["act"] == Act.PUT].tolist()}, reverse=True)
    journal = Journal(site.folder / f"client-{SWEEPER}-1.journal")
    with Client(site.masters, tenant=TENANT, token=TOKEN, deadline_s=site.deadline_s) as client:
        for start in range(0, min(len(blocks), MAX_SWEPT), SWEEP_BLOCKS):
            part = [BlockName.unpacked(block) for block in blocks[start : start + SWEEP_BLOCKS]]
            began_ns = time.monotonic_ns()
            try:
                values = client.get_batch([block.key for block in part])
            except KVStoreError as error:
                print(f"sweep: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            ended_ns = time.monotonic_ns()
            for block, value in zip(part, values, strict=True):
                outcome, version = Outcome.ABSENT, 0
                if value is not None:
                    try:
                        outcome, version = Outcome.DONE, version_of(block.key, value)
                    except Exception:
                        outcome = Outcome.WRONG
                journal.note(Act.GET, outcome, block.packed(), began_ns, ended_ns, version=version)
    journal.close()


def read_journals(folder: Path) -> list[tuple[int, Any]]:
    return [(int(path.name.split("-")[1]), read(path)) for path in sorted(folder.glob("client-*.journal"))]


def left_open(site: Site) -> list[str]:
    """Return the resources that nodes still hold for clients that have ended."""
    end_s, found = time.monotonic() + SETTLE_S, ["nobody answers"]
    while found and time.monotonic() < end_s:
        time.sleep(LOOK_S)
        status = site.status()
        nodes = status.nodes if status is not None else ()
        names = ("open_puts", "leases", "undecided")
        found = [f"{node.name}: {name} {node.counters[name]}" for node in nodes for name in names if node.counters[name]]
        found += [f"{node.name}: corrupt_reads {node.counters['corrupt_reads']}" for node in nodes if node.counters["corrupt_reads"]]
        found = found if status is not None else ["nobody answers"]
    return found


def judged(site: Site, seen: Seen, deadline_s: float) -> Verdict:
    stopped = {client: Times(intervals) for client, intervals in seen.stopped.items()}
    told = Circumstances(Times(seen.disturbed), seen.lost, stopped, int(deadline_s * 1e9), int(GRACE_S * 1e9))
    return Judge(read_journals(site.folder), told).judge()


def chaos(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    every_s: float,
    lease_s: float,
    deadline_s: float,
    pause_s: float,
    partitions: int,
    names: list[str],
) -> Report:
    with StarHosts(SERVERS + 1) as hosts:
        hosts.enter(SERVERS)
        with Site(folder, hosts, lease_s=lease_s, deadline_s=deadline_s, pause_s=pause_s, partitions=partitions) as site:
            one = Chaos(site, seed, every_s=every_s, names=names)
            one.come_to_rest()
            for client in range(CLIENTS):
                site.start(f"c{client}")
            time.sleep(WARM_UP_S)
            before = site.used()
            began_s = time.monotonic()
            one.run(seconds)
            took_s = time.monotonic() - began_s
            time.sleep(QUIET_S)
            hanging = site.end_clients(deadline_s + SETTLE_S)
            journals = read_journals(folder)
            sweep(site, journals)
            left = left_open(site)
            after = site.used()
            verdict = judged(site, one.seen, deadline_s)
            trouble = [*one.seen.trouble, *(f"client {name} did not end" for name in hanging), *left, *daemons_changed(before, after)]
            return Report.made(
                seed,
                took_s,
                verdict,
                one.seen.faults,
                journals,
                before,
                after,
                trouble,
                writers=CLIENTS,
                unprovoked=one.seen.unprovoked,
                moves=site.moved,
            )


_BEGAN_NS: Final = time.monotonic_ns()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults strike")
    parser.add_argument("--seed", type=int, default=1, help="draws the faults")
    parser.add_argument("--every-s", type=float, default=3.0, help="a fault begins as often")
    parser.add_argument("--lease-s", type=float, default=2.0, help="after which a silent master or node counts as dead")
    parser.add_argument("--deadline-s", type=float, default=10.0, help="of each call of a client")
    parser.add_argument("--pause-s", type=float, default=0.0, help="of each client after each operation: load that leaves processors free")
    parser.add_argument("--partitions", type=int, default=1, help="of the key space, which the masters share out")
    parser.add_argument("--kinds", default=",".join(kinds.MAKERS), help="of faults, comma separated")
    parser.add_argument("--out", type=Path, default=OUT, help="where the report is written, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep logs and journals")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"chaos needs hosts of its own: {reason}", file=sys.stderr)
        return 2
    if unknown := set(arguments.kinds.split(",")) - set(kinds.MAKERS):
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}; there are {', '.join(kinds.MAKERS)}")
    names = [name for name in arguments.kinds.split(",") if name in kinds.possible()]
    folder = Path(tempfile.mkdtemp(prefix="kvstore-chaos-"))
    report = None
    try:
        report = chaos(
            folder,
            seconds=60 * arguments.minutes,
            seed=arguments.seed,
            every_s=arguments.every_s,
            lease_s=arguments.lease_s,
            deadline_s=arguments.deadline_s,
            pause_s=arguments.pause_s,
            partitions=arguments.partitions,
            names=names,
        )
    finally:
        if arguments.keep or report is None or not report.is_good:
            print(f"logs and journals: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    printed(report)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
