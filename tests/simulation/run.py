"""Execution of a schedule: start the cluster, run operations and faults, heal everything, and check the final state.

Every result of a caller is checked against the history (tests/faults/history.py) at once. At the end every fault is healed, and the cluster
has time to recover. Then:

- every operation must succeed;
- every client must find each acknowledged block;
- masters, nodes and catalogs must agree.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvstore.protocol.errors import (
    CatalogUnavailable,
    DeadlineExceeded,
    Full,
    KVStoreError,
    LeaseExpired,
    StaleEpoch,
    StaleHandle,
    Unavailable,
)
from tests.faults.history import History, Removal, Told, Version, Violation
from tests.simulation.agreement import copies_nothing, disagreements, has_all_nodes, is_settled
from tests.simulation.cluster import NODE_TTL_S, PUT_TTL_S, RESERVE_TTL_S, ClientProcess, Cluster
from tests.simulation.faults import Faults
from tests.simulation.machine import installed
from tests.simulation.schedule import TENANTS, Schedule, Step
from tests.simulation.world import MS, Finding, S, World

DEADLINE_S: Final = 3.0
LATE_NS: Final = int(DEADLINE_S * S) // 16 + S // 2
"""Allowed delay of a call beyond its deadline: its socket's timeout is armed a sixteenth late, and it releases reservations (0.2 s)."""
RECOVERY_NS: Final = int(3 * NODE_TTL_S * S) + 5 * S
"""From docs/promises.md: operations succeed 3 TTL and 5 s after healing."""
UNNOTICED_NS: Final = 3 * S // 2
"""Time after the last fault before checks begin: broken links and lost heartbeats are not detected before."""
LOOK_NS: Final = 20 * MS
LEFTOVERS_NS: Final = int(max(PUT_TTL_S, RESERVE_TTL_S) * S) + S
EXPECTED: Final = (Unavailable, DeadlineExceeded, Full, CatalogUnavailable, StaleEpoch, StaleHandle, LeaseExpired)
"""Errors with which an operation may end under a fault. The same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a schedule: `faults` by kind, of which `struck` began during an operation."""

    findings: tuple[Finding, ...]
    trace_hash: str
    lines: tuple[str, ...]
    operations: int
    faults: Counter[str]
    struck: int
    acknowledged: int
    virtual_s: float


class _Errors(logging.Handler):
    """Makes every error that the product logs a finding."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self._world.finding("an error was logged", f"{record.getMessage()}: {type(cause).__name__}: {cause}", cause)


class Run:
    """One run. Use once."""

    def __init__(self, schedule: Schedule, *, keeps_trace: bool = False) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed, keeps_trace=keeps_trace)
        self.cluster = Cluster(self.world, schedule.shape)
        self.history = History()
        self.faults = Faults(self.cluster)
        self._under_way = 0
        self._operations = self._struck = self._acknowledged = 0
        self._applied: Counter[str] = Counter()
        self._away: list[Removal] = []
        """Removals that were acknowledged while a node was unreachable."""
        self._holders: dict[Version, list[object]] = {}
        """Processes that held a block when it was acknowledged."""
        self._flushed_ns: dict[int, int] = {}
        """By writer: start of the last flush that returned."""

    def execute(self) -> Outcome:
        log = logging.getLogger("kvstore")
        handler, former = _Errors(self.world), (log.level, log.propagate)
        log.addHandler(handler)
        log.setLevel(logging.ERROR)
        log.propagate = False
        try:
            with installed(self.cluster.machine):
                try:
                    self._all()
                finally:
                    self.world.close()
        finally:
            log.removeHandler(handler)
            log.setLevel(former[0])
            log.propagate = former[1]
        world = self.world
        world.trace("end", world.events, world.rng.getrandbits(64))
        return Outcome(
            tuple(world.findings),
            world.trace_hash(),
            tuple(world.lines or ()),
            self._operations,
            self._applied,
            self._struck,
            self._acknowledged,
            world.now_ns / S,
        )

    def _all(self) -> None:
        world, cluster = self.world, self.cluster
        cluster.start()
        if not self._await_settled(60 * S):
            world.finding("it does not start", "no owner with all nodes after 60 s")
        if world.findings:
            return
        start_ns = world.now_ns
        for step in self.schedule.steps:
            world.push(start_ns + int(step.at_ms * MS), None, lambda step=step: self._step(step))  # type: ignore[misc]
        last_ns = start_ns + int(max((step.at_ms for step in self.schedule.steps), default=0) * MS)
        world.run(last_ns + 1)
        world.run(world.now_ns + 60 * S, until=lambda: self.faults.under_way == 0)
        if not world.findings:
            self._check_recovery()

    def _check_recovery(self) -> None:
        world, cluster = self.world, self.cluster
        healed_ns = world.now_ns
        world.run(healed_ns + UNNOTICED_NS)
        if not self._await_settled(healed_ns + RECOVERY_NS):
            what = f"{self._under_way} operations under way, or a node is not back"
            world.finding("not healed", f"{what}, {RECOVERY_NS / S:g} s after healing")
        if world.findings:
            return
        for removal in self._away:
            self.history.end_remove(removal, is_gone=True, at=world.now_ns, nodes_were_away=True)
        self._read_all()
        world.run(world.now_ns + LEFTOVERS_NS)
        world.run(world.now_ns + RECOVERY_NS, until=lambda: copies_nothing(cluster))  # of what was read just now
        if not world.findings:
            for kind, detail in disagreements(cluster):
                world.finding(kind, detail)

    def _await_settled(self, until_ns: int) -> bool:
        """Wait until the cluster is settled; return False at `until_ns`. It is checked every LOOK_NS, since a check is slow."""
        world = self.world
        while not world.findings and (self._under_way or not is_settled(self.cluster)):
            if world.now_ns >= until_ns:
                return False
            world.run(world.now_ns + LOOK_NS)
        return True

    def _read_all(self) -> None:
        """Read every block that was ever put, with every client."""
        world = self.world
        for client in self.cluster.clients:
            for tenant, key in self.history.places():
                self._begin(client, lambda client=client, tenant=tenant, key=key: self._last_get(client, tenant, key))  # type: ignore[misc]
                world.run(world.now_ns + 60 * S, until=lambda: not self._under_way)
                if world.findings:
                    return

    def _last_get(self, client: ClientProcess, tenant: str, key: bytes) -> None:
        try:
            value = self._get(client, tenant, key)
        except KVStoreError as error:
            self.world.finding("not healed", f"{client.process.name} get {tenant}/{key.hex()}: {type(error).__name__}: {error}")
            return
        if value is None and (lost := self._lost(tenant, key)) is not None:
            self.world.finding("a lost block", f"{lost}: a miss at {client.process.name}")

    def _lost(self, tenant: str, key: bytes) -> Version | None:
        """Return a version that must exist: acknowledged, its holder alive ever since, and neither removed nor evicted."""
        history = self.history
        for version in history.of(tenant, key) if self._is_roomy else ():
            is_held = any(getattr(holder, "is_alive", False) for holder in self._holders.get(version, ()))
            others_may_have_won = self.faults.deaths and history.rivals(version)
            if version.told is Told.STORED and is_held and not history.may_be_removed(version) and not others_may_have_won:
                return version
        return None

    @property
    def _is_roomy(self) -> bool:
        """Return whether all blocks fit in every node, so that none is evicted."""
        return self.schedule.shape.dram_bytes >= 200 << 10

    # --- steps ---

    def _step(self, step: Step) -> None:
        if step.is_fault:
            self._applied[step.kind] += 1
            self._struck += self._under_way > 0
            self.faults.apply(step)
            return
        client = self.cluster.clients[step.args[0]]
        if client.process.is_alive:
            self._begin(client, lambda: self._operate(client, step))

    def _begin(self, client: ClientProcess, operate: Callable[[], None]) -> None:
        """Run `operate` in a thread of the client's process, which may die meanwhile."""
        self._under_way += 1
        self._operations += 1
        process = client.process
        is_over: list[bool] = []

        def over() -> None:
            if not is_over:
                is_over.append(True)
                self._under_way -= 1

        def run() -> None:
            try:
                operate()
            except Violation as violation:
                self.world.finding(violation.kind, violation.detail)
            finally:
                over()

        process.on_death.append(over)
        process.spawn(run, "operation")

    def _operate(self, client: ClientProcess, step: Step) -> None:
        _, tenant, *rest = step.args
        world, began_ns = self.world, self.world.now_ns
        process = client.process
        world.trace(process.name, step)
        try:
            match step.kind:
                case "put":
                    told: Any = self._put(client, tenant, [rest[0].encode()], rest[1], rest[2])
                case "put_batch":
                    told = self._put(client, tenant, [key.encode() for key in rest[0]], rest[1], rest[2])
                case "get":
                    told = self._get(client, tenant, rest[0].encode()) is not None
                case "get_batch":
                    told = self._get_batch(client, tenant, [key.encode() for key in rest[0]])
                case "exists":
                    told = client.client(tenant).exists(rest[0].encode(), deadline_s=DEADLINE_S)
                    if not told:
                        self._check_missed(tenant, rest[0].encode(), began_ns)
                case "remove":
                    told = self._remove(client, tenant, rest[0].encode())
                case "flush":
                    client.client(tenant).flush(deadline_s=DEADLINE_S)
                    self.history.flushed(self._writer(client, tenant), begun_at=began_ns, at=world.now_ns)
                    self._flushed_ns[self._writer(client, tenant)] = began_ns
                    told = None
                case _:
                    raise AssertionError(f"there is no operation {step.kind!r}")
        except EXPECTED as error:
            told = type(error).__name__
            if step.kind == "flush" and "and with it what was put there" in str(error):
                self.history.flush_told_loss(self._writer(client, tenant), begun_at=began_ns)
            if self.faults.is_calm_since(self._felt_since(client, step, began_ns)) and self._is_roomy and not self._may_fail(step):
                world.finding("an operation failed without a fault", f"{step}: {type(error).__name__}: {error}")
        except KVStoreError as error:
            told = type(error).__name__
            world.finding("an unexpected error", f"{step}: {type(error).__name__}: {error}", error)
        world.trace(process.name, step.kind, *rest[:1], "->", told)
        late_ns = world.now_ns - began_ns - int(DEADLINE_S * S)
        if late_ns > LATE_NS and not process.was_stopped_since(began_ns):
            world.finding("beyond its deadline", f"{step}: {late_ns / S:.3f} s late")

    def _felt_since(self, client: ClientProcess, step: Step, began_ns: int) -> int:
        """Return the time since which a fault may make the step fail. A flush reports all losses since the previous flush."""
        since_ns = min(began_ns, self._flushed_ns.get(self._writer(client, step.args[1]), 0)) if step.kind == "flush" else began_ns
        return since_ns - RECOVERY_NS

    def _may_fail(self, step: Step) -> bool:
        """Return whether the step may fail without a fault. Replication may outlast the call: it retries a busy node only after seconds."""
        return step.kind == "put" and step.args[3] == "replicas"

    def _writer(self, client: ClientProcess, tenant: str) -> int:
        """Return the writer number of a client object, which tracks its own uncommitted puts."""
        return client.process.pid * len(TENANTS) + TENANTS.index(tenant)

    def _put(self, client: ClientProcess, tenant: str, keys: Sequence[bytes], ack: str, size_bytes: int) -> list[Any]:
        world, history, writer = self.world, self.history, self._writer(client, tenant)
        versions = [history.begin_put(tenant, key, writer=writer, ack=ack, size_bytes=size_bytes, at=world.now_ns) for key in keys]
        began_ns = world.now_ns
        options: dict[str, Any] = {"replicas": 2} if ack == "replicas" else {}
        try:
            values = [version.value for version in versions]
            stored = client.client(tenant).put_batch(keys, values, ack=ack, deadline_s=DEADLINE_S, **options)
        except BaseException:
            for version in versions:
                version.told = Told.FAILED
            raise
        for version, is_stored in zip(versions, stored, strict=True):
            history.end_put(version, Told.STORED if is_stored else Told.PRESENT, at=world.now_ns)
            if is_stored:
                self._check_acknowledged(version, began_ns)
            elif len(history.of(tenant, version.key)) == 1 and self.faults.is_calm_since(began_ns - RECOVERY_NS):
                world.finding("present and never put", str(version))
        return stored

    def _check_acknowledged(self, version: Version, began_ns: int) -> None:
        """Check that an acknowledged block is stored, unless it may have been removed or evicted meanwhile."""
        self._acknowledged += 1
        place = version.tenant, version.key
        checksum = xxhash.xxh3_64_intdigest(version.value)
        holders = [
            daemon.process
            for daemon in self.cluster.nodes
            if (block := self.cluster.blocks_at(daemon).get(place)) is not None and block.checksum == checksum
        ]
        self._holders[version] = list(holders)
        if self.history.may_be_removed(version) or not self._is_roomy or self.history.rivals(version):
            return
        record = self.cluster.record(*place)
        if not holders and self.faults.is_calm_since(began_ns - RECOVERY_NS):
            self.world.finding("acknowledged and nowhere", str(version))
        if holders and version.ack != "node" and (record is None or record[1] != checksum):
            self.world.finding("acknowledged and not durable", str(version))

    def _get(self, client: ClientProcess, tenant: str, key: bytes) -> bytes | None:
        began_ns = self.world.now_ns
        value = client.client(tenant).get(key, deadline_s=DEADLINE_S)
        if value is not None:
            self.history.check_read(tenant, key, value, begun_at=began_ns)
        else:
            self._check_missed(tenant, key, began_ns)
        return value

    def _get_batch(self, client: ClientProcess, tenant: str, keys: Sequence[bytes]) -> int:
        began_ns = self.world.now_ns
        values = client.client(tenant).get_batch(keys, deadline_s=DEADLINE_S)
        for key, value in zip(keys, values, strict=True):
            if value is not None:
                self.history.check_read(tenant, key, value, begun_at=began_ns)
            else:
                self._check_missed(tenant, key, began_ns)
        return sum(value is not None for value in values)

    def _check_missed(self, tenant: str, key: bytes, began_ns: int) -> None:
        """Check that a miss had a cause: a fault, other than an orderly handover of partitions, or a block not yet in the directory."""
        version = self._lost(tenant, key) if self.faults.is_orderly_since(began_ns - RECOVERY_NS) else None
        if version is not None and version.known_at is not None and version.known_at <= began_ns:
            self.world.finding("a miss without a fault", str(version))

    def _remove(self, client: ClientProcess, tenant: str, key: bytes) -> int:
        removal = self.history.begin_remove(tenant, key, writer=self._writer(client, tenant), at=self.world.now_ns)
        count = client.client(tenant).remove([key], deadline_s=DEADLINE_S)
        if count and not has_all_nodes(self.cluster):
            self._away.append(removal)  # an unlinked node learns of it at its next registration, and serves reads until then
        else:
            self.history.end_remove(removal, is_gone=count == 1, at=self.world.now_ns)
        return count


def run_schedule(schedule: Schedule, *, keeps_trace: bool = False) -> Outcome:
    with collecting_only_now():
        return Run(schedule, keeps_trace=keeps_trace).execute()


@contextmanager
def collecting_only_now() -> Iterator[None]:
    """Collect garbage only at the end and when the world requests it: automatic collections depend on earlier runs in the process."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)
        if is_enabled:
            gc.enable()
