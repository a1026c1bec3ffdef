"""Faults while blocks move: home copies, hot copies, prefetches and demotions.

One node, the source, is filled until it is nearly full, so that blocks which it commits are copied to other nodes. Then a node dies, hangs
or is filled: the source, or the home, which holds the most copies. Blocks keep moving meanwhile. Afterwards

- every block that was acknowledged with two replicas and pinned must be there;
- so must every acknowledged block of which a holder neither died nor evicted any block since;
- every value that is read must be one that was put.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kvstore.client import operations
from kvstore.client.sync import Client
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.address import is_local_socket
from tests.faults.beside import meanwhile
from tests.faults.site import FILLER, FILLER_TOKEN, SERVERS, TENANT, TOKEN, Site, settled
from tests.system.history import value_of, version_of

MOVES: Final = ("home_copies", "hot_copies", "prefetched_blocks", "demotions")
COMBINATIONS: Final = tuple((where, how) for how in ("killed", "stopped", "full") for where in ("source", "home"))
STOPPED_LEASES: Final = 3
"""Lease times for which a stopped node hangs: the others take it for dead."""
PINNED: Final = 8
PROMPT: Final = 8
"""Blocks of a prompt, each the parent of the next."""
BLOCK_BYTES: Final = 64 << 10
BALLAST_BYTES: Final = 256 << 10
BALLAST: Final = 16
"""Blocks of a batch that fills a node."""
MAX_BATCHES: Final = 60
NEARLY_FULL: Final = 0.9
MIN_COPIES: Final = 24
"""Home copies before the fault strikes."""
BEGIN_S: Final = 15.0
"""Time for these."""
HOT_READS: Final = 8
LOOK_S: Final = 0.1
PAUSE_S: Final = 0.3
AFTER_S: Final = 1.0
"""Blocks move for so long after the fault has ended."""
FOUND_S: Final = 60.0
"""Time within which required blocks must be found, since other faults may strike masters meanwhile."""
T = TypeVar("T")
_CONSTRUCTION = threading.Lock()


@dataclass(slots=True)
class Moved:
    """Counts of one fault."""

    kind: str
    before: Counter[str] = field(default_factory=Counter)
    """Blocks moved before it struck, by the kind of move."""
    during: Counter[str] = field(default_factory=Counter)
    """From then on, until the load ended."""
    acknowledged: int = 0
    pinned: int = 0
    """Acknowledged with two replicas and pinned: all must be there."""
    required: int = 0
    """Others with a holder that neither died nor evicted."""
    found: int = 0
    """Values read at the end, every byte compared."""


class _Tally:
    """Sums of the cluster's counters, which begin at 0 with each process."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        """By node."""
        self._last: dict[str, int] = {}

    def look(self, status: pb.StatusReply | None) -> None:
        if status is None:
            return
        for name in ("home_copies", "hot_copies"):
            self._add(self.totals, name, status.owner.name, status.counters[name])
        for node in status.nodes:
            self._add(self.totals, "prefetched_blocks", node.name, node.counters["prefetched_blocks"])
            for tier in node.tiers:
                self._add(self.totals, "demotions", f"{node.name} {tier.name}", tier.demotions)
                self._add(self.evicted, node.name, tier.name, tier.evictions)

    def _add(self, sums: Counter[str], name: str, of: str, value: int) -> None:
        last = self._last.get(f"{name} {of}", value)
        sums[name] += value - last if value >= last else value
        self._last[f"{name} {of}"] = value


class Moves:
    """One fault: the load that makes blocks move, the strike, and the check. Use once."""

    def __init__(self, site: Site, where: str, how: str, source: int) -> None:
        self._site, self._where, self._how = site, where, how
        self._source = f"n{source}"
        self._number = len(site.moved)
        self._tally = _Tally()
        self._holders: dict[bytes, set[str]] = {}
        """Acknowledged blocks, and the nodes that held them when they were last located."""
        self._hot = b"hot/%d" % self._number
        self._pinned: list[bytes] = []
        self._ballast: list[bytes] = []
        self._killed: set[str] = set()
        self._prompts = 0
        self._wrong: list[str] = []
        """Wrong bytes that were read while blocks moved."""
        self.result = Moved(f"{where} {how}")

    def run(self, strike: Callable[[], None], killed: Callable[[str], None]) -> None:
        """`strike` is called when the fault takes effect; `killed` kills a node. Raises AssertionError for what may not happen."""
        self._site.moved.append(self.result)
        with ExitStack() as stack:
            client, reader, filler = (stack.enter_context(one) for one in self._clients())
            with meanwhile(lambda: self._tally.look(self._site.status()), every_s=LOOK_S):
                try:
                    self._begin(client, filler)
                    with meanwhile(lambda: self._move(client, reader)):
                        self._await_copies()
                        self._locate(client)
                        self.result.before = Counter(self._tally.totals)
                        self._strike(self._victim(), filler, strike, killed)
                        time.sleep(AFTER_S)
                    self.result.during = self._tally.totals - self.result.before
                    self._check(client)
                finally:
                    self._clean_up(client, filler)

    # --- the load ---

    def _clients(self) -> Iterator[Client]:
        def made(tenant: str, token: str) -> Client:
            return _patiently(lambda: Client(self._site.masters, tenant=tenant, token=token, deadline_s=self._site.deadline_s))

        yield made(TENANT, TOKEN)
        with _far():
            reader = made(TENANT, TOKEN)
        yield reader
        yield made(FILLER, FILLER_TOKEN)

    def _begin(self, client: Client, filler: Client) -> None:
        """Put the pinned blocks, and fill the source until it is nearly full."""
        keys = [b"pinned/%d/%d" % (self._number, number) for number in range(PINNED)]
        _patiently(lambda: client.put_batch(keys, [_value(key) for key in keys], ack="replicas", replicas=2))
        assert all(_patiently(lambda: client.pin(keys))), "a block that was put a moment ago cannot be pinned"
        self._pinned, self.result.pinned = keys, len(keys)
        _patiently(lambda: client.put(self._hot, _value(self._hot), ack="cluster"))
        for _ in range(MAX_BATCHES):
            if self._used_share(self._source) >= NEARLY_FULL:
                return
            self._fill(filler, self._source)
        raise AssertionError(f"{self._source} does not become nearly full: {self._used_share(self._source):.0%}")

    def _fill(self, filler: Client, name: str) -> None:
        """Put another batch at the node, as another tenant."""
        keys = [b"ballast/%d/%d" % (self._number, len(self._ballast) + number) for number in range(BALLAST)]
        self._ballast += keys
        self._tie(filler, name)
        _tried(lambda: filler.put_batch(keys, [value_of(key, 0, BALLAST_BYTES) for key in keys], ack="node"))
        _tried(filler.flush)

    def _move(self, client: Client, reader: Client) -> None:
        """Put one more prompt at the source, have another host read a block often, and have another node prefetch the prompt."""
        keys = [b"prompt/%d/%d/%d" % (self._number, self._prompts, number) for number in range(PROMPT)]
        self._prompts += 1
        self._tie(client, self._source)
        parents = [None, *keys[:-1]]
        put = _tried(lambda: client.put_batch(keys, [_value(key) for key in keys], parents=parents, ack="node"))
        if put is not None and _tried(lambda: client.flush() or True):
            located = _tried(lambda: client.locate(keys)) or [[]] * len(keys)
            self._holders |= {key: {place.node for place in places} for key, places in zip(keys, located, strict=True)}
        for _ in range(HOT_READS):
            try:
                _compare(self._hot, _tried(lambda: reader.get(self._hot)))
            except AssertionError as error:
                self._wrong.append(str(error))
        self._tie(client, next(f"n{node}" for node in range(SERVERS) if f"n{node}" != self._source))
        _tried(lambda: client.prefetch(keys))

    def _tie(self, client: Client, name: str) -> None:
        """Have the client take this node as that of its host."""
        _tried(lambda: client.exists(b"nothing"))  # it learns the nodes
        status = self._site.status()
        nodes = {node.name: node.node_id for node in status.nodes} if status is not None else {}
        if name in nodes:
            client._operations.resources.daemons.nodes.local_id = nodes[name]

    def _await_copies(self) -> None:
        end_s = time.monotonic() + BEGIN_S
        while self._tally.totals["home_copies"] < MIN_COPIES:
            assert time.monotonic() < end_s, f"{self._tally.totals['home_copies']} home copies in {BEGIN_S:g} s"
            time.sleep(LOOK_S)

    def _locate(self, client: Client) -> None:
        keys = list(self._holders)
        for key, places in zip(keys, _patiently(lambda: client.locate(keys)), strict=True):
            self._holders[key] = {place.node for place in places}

    # --- the fault ---

    def _victim(self) -> str:
        if self._where == "source":
            return self._source
        held = Counter(name for holders in list(self._holders.values()) for name in holders - {self._source})
        return held.most_common(1)[0][0] if held else f"n{(int(self._source[1:]) + 1) % SERVERS}"

    def _strike(self, victim: str, filler: Client, strike: Callable[[], None], killed: Callable[[str], None]) -> None:
        site = self._site
        strike()
        if self._how == "killed":
            self._killed.add(victim)
            killed(victim)
            time.sleep(PAUSE_S)
            site.start(victim)
        elif self._how == "stopped":
            site.signal(victim, signal.SIGSTOP)
            try:
                time.sleep(STOPPED_LEASES * site.lease_s)
            finally:
                site.signal(victim, signal.SIGCONT)
        else:
            evicted = self._tally.evicted[victim]
            for _ in range(MAX_BATCHES):
                self._fill(filler, victim)
                if self._tally.evicted[victim] > evicted + BALLAST:
                    return
            raise AssertionError(f"{victim} evicts nothing, though {len(self._ballast)} blocks were put there")

    # --- the check ---

    def _check(self, client: Client) -> None:
        end_s = time.monotonic() + FOUND_S
        while not settled(self._site.status()) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        for _ in range(2):  # the first may have been on its way
            self._await_heartbeats(end_s)
        assert not self._wrong, self._wrong[0]
        suspect = self._killed | {name for name, count in self._tally.evicted.items() if count}
        required = {key for key, holders in self._holders.items() if holders - suspect}
        self.result.acknowledged, self.result.required = len(self._holders), len(required)
        wanted = [*self._pinned, *self._holders]
        missing: set[bytes] = set()
        while time.monotonic() < end_s:
            values = _tried(lambda: client.get_batch(wanted))
            if values is None:
                continue
            self.result.found = sum(_compare(key, value) for key, value in zip(wanted, values, strict=True))
            missing = {key for key, value in zip(wanted, values, strict=True) if value is None} & (required | set(self._pinned))
            if not missing:
                return
            time.sleep(PAUSE_S)
        example = min(missing, default=b"")
        raise AssertionError(f"{len(missing)} acknowledged blocks are lost, such as {example!r}; {suspect or 'no node'} died or evicted")

    def _await_heartbeats(self, end_s: float) -> None:
        """Wait until each node has sent another heartbeat: evictions are as of the last ones."""
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < end_s - began_s:
            status = self._site.status()
            self._tally.look(status)
            if status is not None and settled(status) and all(node.heartbeat_age_s < passed_s for node in status.nodes):
                return
            time.sleep(LOOK_S)

    def _clean_up(self, client: Client, filler: Client) -> None:
        prompts = [b"prompt/%d/%d/%d" % (self._number, one, number) for one in range(self._prompts) for number in range(PROMPT)]
        _patiently(lambda: client.unpin(self._pinned))
        _patiently(lambda: client.remove([self._hot, *self._pinned, *prompts], force=True))
        _patiently(lambda: filler.remove(self._ballast, force=True))

    def _used_share(self, name: str) -> float:
        status = self._site.status()
        tiers = [tier for node in (status.nodes if status is not None else ()) if node.name == name for tier in node.tiers]
        capacity_bytes = sum(tier.capacity_bytes for tier in tiers)
        return sum(tier.used_bytes + tier.quarantined_bytes for tier in tiers) / capacity_bytes if capacity_bytes else 0.0


def summed(moved: Sequence[Moved]) -> dict[str, Any]:
    """Return the sums of the counts by kind, for a report."""
    found: dict[str, Any] = {}
    for one in moved:
        row = found.setdefault(one.kind, Counter())
        row.update({"made": 1, **{name: getattr(one, name) for name in ("acknowledged", "pinned", "required", "found")}})
        row.update({f"{name} before": one.before[name] for name in MOVES})
        row.update({f"{name} during": one.during[name] for name in MOVES})
    return {kind: dict(row) for kind, row in sorted(found.items())}


def _value(key: bytes) -> bytes:
    return value_of(key, 0, BLOCK_BYTES)


def _compare(key: bytes, value: bytes | None) -> bool:
    """Return whether there is a value. Raises AssertionError for wrong bytes."""
    if value is not None:
        version_of(key, value)
    return value is not None


def _tried(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except KVStoreError:
        return None


def _patiently(call: Callable[[], T]) -> T:
    """Repeat the call until it succeeds. Raises its error after FOUND_S."""
    end_s = time.monotonic() + FOUND_S
    while True:
        try:
            return call()
        except KVStoreError:
            if time.monotonic() > end_s:
                raise
            time.sleep(LOOK_S)


@contextmanager
def _far() -> Iterator[None]:
    """A client made inside is on another host: it reaches nodes by TCP."""
    with _CONSTRUCTION:
        former = is_local_socket
        setattr(operations, "is_local_socket", lambda _unix, _host_id: False)  # noqa: B010 - as in client.py
        try:
            yield
        finally:
            setattr(operations, "is_local_socket", former)  # noqa: B010
