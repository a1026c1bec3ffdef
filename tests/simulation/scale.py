"""A cluster of a thousand nodes in the simulated world: messages and processor time of each role, and which role saturates first.

python -m tests.simulation.scale                    # 1,000 nodes, 10,000 clients, a sample of their blocks and requests.
python -m tests.simulation.scale --nodes 100        # see --help for more.
python -m tests.simulation.scale --directory-blocks 100000000   # an owner with so many blocks, 9 GB of memory.

Masters, nodes and clients are the real ones with the settings of a real cluster. Figures are the messages and the processor time of the
product's code, in the one thread that runs everything. The time of the models of the operating system and of etcd is subtracted. So figures
exclude the kernel and the transfer of values. The cost of a heartbeat with the kernel's part is measured on a real master. Rows go to
benchmarks/out/scale.json.
"""

import argparse
import heapq
import itertools
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash
from rich.console import Console

from benchmarks.harness import write
from benchmarks.masters.memory import PUBLISHED, resident_bytes
from kvstore.cli.tools.bench import BenchRow, table
from kvstore.client.sync import Client
from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.config import MasterSettings
from kvstore.master.directory.directory import Directory
from kvstore.master.master import Master
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Heartbeat
from kvstore.protocol.settings import Size
from kvstore.store.config import NodeSettings
from kvstore.store.node import Node
from tests.master.running import MasterProcess, NodeSide
from tests.simulation.agreement import is_settled
from tests.simulation.cluster import PORT, RUN_DIR, ClientProcess, Cluster, Daemon, Shape
from tests.simulation.machine import Machine, installed
from tests.simulation.network import Network, SimSocket
from tests.simulation.run import collecting_only_now
from tests.simulation.world import MS, Process, S, Thread, World

OUT: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "out" / "scale.json"
TENANT: Final = "default"
VALUE: Final = bytes(64)
"""Small, since the measurements are about blocks, not bytes."""
PUT_BLOCKS: Final = 250
PROMPT_BLOCKS, HIT_BLOCKS = 24, 12
"""Of a request: as many tokens as a request of the conversation trace has, 12,000 at 512 a block, and the half of it found."""
SECONDS: Final = 5
"""Each phase is measured for so long."""
LOST_NODES: Final = 50
BEATS: Final = 3000
NODE_DRAM_BYTES: Final = 1 << 20
_SCATTER: Final = xxhash.xxh3_128_digest
"""Keys of 16 bytes from all over, as prefix hashes are."""
NAMES: Final = {"owner": "an owner", "node": "nodes", "client": "clients"}
IDLE_NAMES: Final = {**NAMES, "node": "a node"}
LOOK_NS: Final = 20 * MS
UNTIL_NS: Final = 120 * S


@dataclass
class Used:
    """Processor time and messages of processes."""

    cpu_ns: int = 0
    messages: int = 0
    bytes: int = 0

    def add(self, other: "Used", times: int = 1) -> "Used":
        return Used(self.cpu_ns + times * other.cpu_ns, self.messages + times * other.messages, self.bytes + times * other.bytes)


class Meter:
    """Usage of each process since its last reading, and the world's part of an event's time."""

    def __init__(self) -> None:
        self.used: dict[str, Used] = {}
        self.outside_ns = 0

    def of(self, process: Process) -> Used:
        return self.used.setdefault(process.name, Used())

    def read(self) -> dict[str, Used]:
        read, self.used = self.used, {}
        return read


class MeasuredWorld(World):
    """Times each event."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.meter = Meter()

    def run(self, limit_ns: int, until: Callable[[], bool] | None = None) -> None:
        meter = self.meter
        while not self.findings and self.queue and self.queue[0][0] <= limit_ns and not (until is not None and until()):
            self.now_ns, _, process, call = heapq.heappop(self.queue)
            if process is None:
                call()
            elif process.is_alive:
                self.process, meter.outside_ns, began_ns = process, 0, time.thread_time_ns()
                call()
                if not _is_of_etcd(call):
                    meter.of(process).cpu_ns += time.thread_time_ns() - began_ns - meter.outside_ns
                self.process = None
        if until is None:
            self.now_ns = max(self.now_ns, limit_ns)


def _is_of_etcd(call: Any) -> bool:
    """A step of a thread of the model of etcd in a master."""
    given = getattr(call, "args", ())
    thread = given[0] if given and isinstance(given[0], Thread) else getattr(getattr(call, "func", call), "__self__", None)
    return isinstance(thread, Thread) and thread.name.startswith("catalog-")


class MeasuredNetwork(Network):
    """Counts messages and subtracts its own time."""

    world: MeasuredWorld

    def carry(self, sock: SimSocket, item: tuple[bytes, tuple[int, ...]] | None) -> None:
        began_ns, meter = time.thread_time_ns(), self.world.meter
        super().carry(sock, item)
        if item is not None:
            used = meter.of(sock.process)
            used.messages += 1
            used.bytes += len(item[0])
        meter.outside_ns += time.thread_time_ns() - began_ns


class MeasuredMachine(Machine):
    """Daemons beat and tick as often as real ones."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.network = MeasuredNetwork(world, self.descriptors)
        self.control.network = self.network

    def names(self) -> list[tuple[Any, str, Any]]:
        return [entry for entry in super().names() if entry[1] not in ("EXPIRE_INTERVAL_S", "HEARTBEAT_INTERVAL_S", "PERIOD_S")]


class Many(Cluster):
    """Nodes on hosts of their own, clients spread over these, with the settings of a real cluster."""

    machine_class = MeasuredMachine

    def start(self) -> None:
        for daemon in self.daemons:
            self.start_daemon(daemon)

    def start_clients(self, count: int) -> None:
        nodes = len(self.nodes)
        self.clients = [ClientProcess(self, index, self.hosts[index % nodes]) for index in range(count)]

    def _run_master(self, daemon: Daemon) -> None:
        listen = f"{daemon.host.name}:{PORT}"
        settings = MasterSettings(
            listen=listen,
            run_dir=f"{RUN_DIR}/master",
            catalog="etcd://etcd:2379",
            partitions=self.shape.partitions,
            allow_unauthenticated=True,
            http="",
        )
        master = daemon.master = Master(settings)
        master.start()

    def _run_node(self, daemon: Daemon) -> None:
        settings = NodeSettings(
            master=self.addresses,
            listen=f"{daemon.host.name}:{PORT + 10}",
            name=daemon.name,
            run_dir=f"{RUN_DIR}/node",
            dram=Size(NODE_DRAM_BYTES),
            allow_unauthenticated=True,
            http="",
        )
        daemon.node = Node(settings)
        daemon.node.start()

    def owning(self) -> list[Daemon]:
        """The masters that own a partition."""
        owned = self.owners()
        return [daemon for daemon in self.masters if daemon.master is not None and any(one in owned for one in daemon.master.partitions)]

    def is_owned(self) -> bool:
        return len(self.owners()) == self.shape.partitions

    def blocks_known(self) -> int:
        return sum(partition.role_manager.leader().directory.counts().blocks for partition in self.owners())

    def nodes_known(self) -> int:
        """Return the number of live nodes, as the master with the most of them sees it."""
        return max(len(partition.role_manager.leader().directory.members.live()) for partition in self.owners())


class Trouble(Exception):
    """The cluster failed a phase."""


class Scale:
    """The phases, one after another in one world."""

    def __init__(self, nodes: int, clients: int, blocks: int, requests: int, *, partitions: int, directory_blocks: int = 0) -> None:
        self.world = MeasuredWorld(1)
        self.cluster = Many(self.world, Shape(masters=3, nodes=nodes, clients=0, uses_index=True, partitions=partitions))
        self._clients, self._blocks, self._requests, self._directory_blocks = clients, blocks, requests, directory_blocks
        self._under_way = 0
        self._rng = random.Random(2)

    def rows(self) -> Iterator[BenchRow]:
        cluster, nodes = self.cluster, len(self.cluster.nodes)
        with installed(cluster.machine):
            cluster.start()
            yield BenchRow(f"{nodes} nodes register: until all have", self._until(lambda: is_settled(cluster)), "s")
            yield from self._computed("a node that registers", nodes)
            idle = self._measured(SECONDS, lambda: None)
            for role, used in idle.items():
                yield from _told(f"nobody asks: a second of {IDLE_NAMES[role]}", used, SECONDS * (nodes if role == "node" else 1))
            yield from self._filled()
            if self._directory_blocks:
                yield from self._stocked(idle)
            yield from self._loaded(idle)
            yield from self._lost()
            if self._directory_blocks:
                yield from self._swept(idle)
            yield from self._taken_over()
            self.world.close()

    # --- phases ---

    def _filled(self) -> Iterator[BenchRow]:
        """Put blocks: a client on every node's host puts its share."""
        cluster, share = self.cluster, self._blocks // len(self.cluster.nodes)
        cluster.start_clients(self._clients)
        self._all(cluster.clients, lambda client: client.client(TENANT).exists(b"?"))
        self.world.meter.read()
        self._all(cluster.clients[: len(cluster.nodes)], lambda client: self._fill(client, share))
        self._until(lambda: is_settled(cluster))
        for role, used in self._by_role(self.world.meter.read()).items():
            yield from _told(f"a block that is put and published: {NAMES[role]}", used, share * len(cluster.nodes))

    def _fill(self, client: ClientProcess, share: int) -> None:
        for first in range(0, share, PUT_BLOCKS):
            keys = [_key(client.index, number) for number in range(first, min(first + PUT_BLOCKS, share))]
            client.client(TENANT).put_batch(keys, [VALUE] * len(keys))
        client.client(TENANT).flush()

    def _stocked(self, idle: dict[str, Used]) -> Iterator[BenchRow]:
        """Enter rows of many more blocks into the owners' directories, equally many for each node.

        Directories are the part that grows with blocks. No client requests these blocks, so nodes and catalogs do not need them. `idle`
        receives the usage of the idle cluster with them."""
        directories = [partition.role_manager.leader().directory for partition in self.cluster.owners()]
        node_ids = [node.node_id for node in directories[0].members.live()]
        messages = -(-self._directory_blocks // PUBLISHED)
        before, spent_ms = resident_bytes(), []
        for number in range(messages):
            count = min(PUBLISHED, self._directory_blocks - number * PUBLISHED)
            spent_ms.append(_stock(directories[number % len(directories)], node_ids[number % len(node_ids)], number, count))
        known = self.cluster.blocks_known()
        yield BenchRow("blocks that the owners know of", known, "blocks")
        yield BenchRow("their memory a block", (resident_bytes() - before) / self._directory_blocks, "bytes")
        yield BenchRow(f"the longest of {messages} messages of {PUBLISHED} blocks", max(spent_ms), "ms")
        yield BenchRow("the median of them", statistics.median(spent_ms), "ms")
        idle.update(self._measured(SECONDS, lambda: None))
        yield from _told(f"nobody asks, {known} blocks known: a second of an owner", idle["owner"], SECONDS)

    def _loaded(self, idle: dict[str, Used]) -> Iterator[BenchRow]:
        """Run requests of engines: look up a prompt, read the blocks found (half of them from other hosts), and put the rest."""
        share = self._blocks // len(self.cluster.nodes)
        asking = self._rng.sample(self.cluster.clients, min(self._requests, len(self.cluster.clients)))

        def ask() -> None:
            for number in range(self._requests):
                at_ns = self.world.now_ns + self._rng.randrange(SECONDS * S)
                client = asking[number % len(asking)]
                self.world.push(at_ns, None, partial(self._begin, client, partial(self._request, number=number, share=share)))

        used = self._measured(SECONDS, ask)
        self._until(lambda: not self._under_way)
        for role, whole in used.items():
            yield from _told(f"a request of {PROMPT_BLOCKS} blocks: {NAMES[role]}", whole.add(idle.get(role, Used()), -1), self._requests)

    def _request(self, client: ClientProcess, number: int, share: int) -> None:
        rng = random.Random(number)
        owners = client.index % len(self.cluster.nodes), rng.randrange(len(self.cluster.nodes))
        first = rng.randrange(max(1, share - HIT_BLOCKS))
        hits = [_key(owners[number % 2], first + index) for index in range(HIT_BLOCKS)]
        new = [b"new %d %d" % (number, index) for index in range(PROMPT_BLOCKS - HIT_BLOCKS)]
        library: Client = client.client(TENANT)
        if (found := library.match_prefix([*hits, *new])) != min(HIT_BLOCKS, share):
            raise Trouble(f"{found} blocks of request {number} are there")
        if None in library.get_batch(hits[:found]):
            raise Trouble(f"request {number} misses what was there")
        library.put_batch(new, [VALUE] * len(new))

    def _taken_over(self) -> Iterator[BenchRow]:
        """Kill the owner; measure the time until another master owns the catalog and has every node's inventory."""
        cluster, former = self.cluster, self.cluster.owning()[0]
        self.world.meter.read()
        cluster.kill(former)
        cluster.masters.remove(former)
        yield BenchRow("an owner is killed: until others own what it did", self._until(cluster.is_owned), "s")
        yield BenchRow("until they have heard all that nodes have, from there", self._until(lambda: is_settled(cluster)), "s")
        for role, used in self._by_role(self.world.meter.read()).items():
            yield from _told(f"a block of a cluster whose owner died: {NAMES[role]}", used, self._blocks)

    def _lost(self) -> Iterator[BenchRow]:
        """Kill nodes at once; measure the time until no client is sent to them, and the cost."""
        cluster, nodes, share = self.cluster, len(self.cluster.nodes), self._blocks // len(self.cluster.nodes)
        before = cluster.blocks_known()
        lost, cluster.nodes[:] = cluster.nodes[:LOST_NODES], cluster.nodes[LOST_NODES:]
        for daemon in lost:
            cluster.kill(daemon)
        took_s = self._until(lambda: cluster.nodes_known() == len(cluster.nodes))
        yield BenchRow(f"{len(lost)} nodes are killed: until no master sends anybody to them", took_s, "s")
        yield BenchRow("blocks that left with them", before - cluster.blocks_known(), "blocks")
        used = self._by_role(self.world.meter.read())
        yield from _told(
            "a block that a dead node had: an owner", used["owner"], max(1, (share + self._directory_blocks // nodes) * len(lost))
        )

    def _swept(self, idle: dict[str, Used]) -> Iterator[BenchRow]:
        """Forget the dead nodes and their blocks' rows, a slice at a time; measure the owner's cost meanwhile."""
        directories = [partition.role_manager.leader().directory for partition in self.cluster.owners()]

        def in_use() -> int:
            return sum(map(_rows_in_use, directories))

        rows = in_use()
        self._until(lambda: in_use() < rows)
        used = self._measured(SECONDS, lambda: None)["owner"].add(idle["owner"], -1)
        buried = rows - in_use()
        yield BenchRow("rows of forgotten nodes' blocks given back in a second", buried / SECONDS, "blocks")
        yield from _told("a second of that: an owner", used, SECONDS)

    # --- parts ---

    def _all(self, clients: Iterable[ClientProcess], do: Callable[[ClientProcess], object]) -> None:
        for client in clients:
            self._begin(client, do)
        self._until(lambda: not self._under_way)

    def _begin(self, client: ClientProcess, do: Callable[[ClientProcess], object]) -> None:
        self._under_way += 1

        def run() -> None:
            do(client)
            self._under_way -= 1

        client.process.spawn(run, "request")

    def _until(self, is_so: Callable[[], bool]) -> float:
        """Wait until `is_so()` and return the seconds. Raises Trouble on a timeout or a finding."""
        began_ns = self.world.now_ns
        while not is_so():
            if self.world.findings:
                raise Trouble(str(self.world.findings[0]))
            if self.world.now_ns - began_ns > UNTIL_NS:
                raise Trouble("it does not become so")
            self.world.run(self.world.now_ns + LOOK_NS)
        return (self.world.now_ns - began_ns) / S

    def _measured(self, seconds: int, begin: Callable[[], None]) -> dict[str, Used]:
        self.world.meter.read()
        begin()
        self.world.run(self.world.now_ns + seconds * S)
        return self._by_role(self.world.meter.read())

    def _computed(self, what: str, times: int) -> Iterator[BenchRow]:
        for role, used in self._by_role(self.world.meter.read()).items():
            yield from _told(f"{what}: {NAMES[role]}", used, times)

    def _by_role(self, used: dict[str, Used]) -> dict[str, Used]:
        """Return the usage of one owner, and of all nodes and clients together. Followers are left out: they receive writes from etcd only,
        and the cost of its model differs from that of etcd."""
        owning = {daemon.process.name for daemon in self.cluster.owning() if daemon.process is not None}
        found: dict[str, Used] = {}
        for name, one in used.items():
            kind = name.partition("-")[0]
            if kind == "master" and name not in owning:
                continue
            kind = "owner" if kind == "master" else kind
            found[kind] = found.get(kind, Used()).add(one)
        if owning and "owner" in found:
            whole = found["owner"]
            found["owner"] = Used(whole.cpu_ns // len(owning), whole.messages // len(owning), whole.bytes // len(owning))
        return dict(sorted(found.items()))


def _key(owner: int, number: int) -> bytes:
    return b"%08d %08d" % (owner, number)


def _stock(directory: Directory, node_id: int, number: int, count: int) -> float:
    """Enter the rows of `count` new blocks in prompts as long as requests, as one message of this node does; ms of the processor."""
    rows, tenants = directory.columns()
    numbers = range(number * PUBLISHED, number * PUBLISHED + count)
    keys = [_SCATTER(b"%d" % one) for one in numbers]
    parents = [b"" if index % PROMPT_BLOCKS == 0 else keys[index - 1] for index in range(count)]
    puts = BlockPuts(TENANT, keys, [len(VALUE)] * count, list(numbers), [number + 1] * count, [""] * count, parents, [()] * count)
    began_ns = time.thread_time_ns()
    rows.insert_new(tenants.of(TENANT), puts, ((node_id, 1),))
    return (time.thread_time_ns() - began_ns) / MS


def _rows_in_use(directory: Directory) -> int:
    """Return the number of rows, including those of blocks without a holder that are not swept yet."""
    return sum(len(tenant.rows) for tenant in directory.columns()[1])


def _told(what: str, used: Used, times: int) -> Iterator[BenchRow]:
    """Yield the rows of a process's processor time, and of its messages if it sent any."""
    yield BenchRow(what, used.cpu_ns / 1e3 / times, "us")
    if used.messages > 0:
        yield BenchRow(f"{what}, sent", used.messages / times, "messages")
        yield BenchRow(f"{what}, sent", used.bytes / times, "bytes")


def heartbeat_rows() -> Iterator[BenchRow]:
    """Measure the cost of a heartbeat to a real master, including the kernel's part."""
    with tempfile.TemporaryDirectory() as folder:
        master = MasterProcess(Path(folder))
        places = master.start()
        node = NodeSide(places)
        try:
            told = node.registration
            beat = pb.HeartbeatRequest(node_id=told.node_id, registration_epoch=told.registration_epoch)
            beat.tiers.add(name="dram", capacity_bytes=1 << 30, used_bytes=1 << 20)
            for number in range(40):
                beat.counters[f"counter_{number}"] = number
            message = Heartbeat(beat.SerializeToString())
            yield BenchRow("a heartbeat over the link: a real master", _beaten_us(places.pid, lambda: node.ask(message)), "us")
        finally:
            node.close()
            master.stop()


def _beaten_us(pid: int, beat: Callable[[], object]) -> float:
    beat()
    began_s = _cpu_s(pid)
    for _ in range(BEATS):
        beat()
    return 1e6 * (_cpu_s(pid) - began_s) / BEATS


def _cpu_s(pid: int) -> float:
    return sum(int(text) for text in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]) / 100


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=500_000, help="of all nodes together")
    parser.add_argument("--requests", type=int, default=5_000, help=f"in {SECONDS} s")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--directory-blocks", type=int, default=0, help="more, that owners alone know of: 90 bytes of memory each")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # hundreds of nodes say that there is no master yet
    rows: list[BenchRow] = []
    with collecting_only_now():
        scale = Scale(
            chosen.nodes,
            chosen.clients,
            chosen.blocks,
            chosen.requests,
            partitions=chosen.partitions,
            directory_blocks=chosen.directory_blocks,
        )
        for row in itertools.chain(heartbeat_rows(), scale.rows()):
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    Console().print(table(rows))
    write(rows, OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
