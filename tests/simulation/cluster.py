"""Masters, nodes and clients of a simulated world: the product's own Master, Node and Client, each in a process of a host."""

from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.master.config import MasterSettings
from kvstore.master.leadership.partition import Partition
from kvstore.master.master import Master
from kvstore.master.status import role_in
from kvstore.protocol.errors import CatalogUnavailable
from kvstore.protocol.partitions import partition_of
from kvstore.protocol.settings import Size
from kvstore.store.block_table.block import DRAM, NVME, Block
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.config import NodeSettings
from kvstore.store.node import Node
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.tiers.dram import DramTier
from tests.simulation.catalog import ModelCatalog
from tests.simulation.disk import Disk, DiskTier
from tests.simulation.etcd import HOST, Etcd, Shared
from tests.simulation.machine import Machine, clocks_of
from tests.simulation.world import Host, Process, World

PORT: Final = 7440
NODE_TTL_S: Final = 3.0
RESERVE_TTL_S: Final = 4.0
PUT_TTL_S: Final = 4.0
PEER_TIMEOUT_S: Final = 4.0
HOT_READS_PER_S: Final = 0.1
"""Few operations are in a run: some reads by another host make a block hot."""
RUN_DIR: Final = "/run/kvstore"
START_AGAIN_NS: Final = 1_000_000_000
"""Delay of systemd or Kubernetes before it restarts a daemon that ended."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster: `nodes` hosts with a node, a master and a client each as far as there are any, DRAM and NVMe in bytes (0: none)."""

    masters: int = 1
    nodes: int = 2
    clients: int = 2
    dram_bytes: int = 256 << 10
    nvme_bytes: int = 0
    uses_index: bool = False
    max_kept_removals: int = 100
    policy: str = "lru"
    hot_copies: int = 0
    partitions: int = 1


@dataclass
class Daemon:
    """A master or node: its host, and its process of now (None: it is down)."""

    name: str
    host: Host
    process: Process | None = None
    master: Master | None = None
    node: Node | None = None
    disk: Disk = field(default_factory=Disk)
    starts: int = 0


class Cluster:
    """See the module."""

    machine_class = Machine

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape = world, shape
        self.machine = self.machine_class(world)
        self.machine.make_catalog = lambda partition: ModelCatalog(self.etcds[partition], is_shared=shape.partitions > 1 and not partition)
        self.machine.open_tiers = self._open_tiers
        shared = Shared()
        self.etcds = [Etcd(self.machine.network, f"{world.rng.getrandbits(64):016x}", shared) for _partition in range(shape.partitions)]
        """The catalog of each partition."""
        hosts = max(shape.masters, shape.nodes, shape.clients)
        seconds = 1_000_000_000
        self.hosts = [
            Host(f"h{index}", skew_ns=world.rng.randrange(1000) * seconds, wall_offset_ns=world.rng.randrange(-5, 6) * seconds)
            for index in range(hosts)
        ]
        self.etcd_host = Host(HOST)
        self.masters = [Daemon(f"master-{index}", self.hosts[index]) for index in range(shape.masters)]
        self.nodes = [Daemon(f"node-{index}", self.hosts[index]) for index in range(shape.nodes)]
        self.addresses = ",".join(f"{daemon.host.name}:{PORT}" for daemon in self.masters)
        self.clients: list[ClientProcess] = []

    def start(self) -> None:
        for daemon in self.daemons:
            self.start_daemon(daemon)
        for index in range(self.shape.clients):
            self.clients.append(ClientProcess(self, index, self.hosts[index]))

    # --- daemons ---

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.masters, *self.nodes]

    def start_daemon(self, daemon: Daemon) -> None:
        daemon.starts += 1
        process = daemon.process = self.world.start(daemon.host, f"{daemon.name}.{daemon.starts}")
        daemon.master = daemon.node = None
        begin = self._run_master if daemon in self.masters else self._run_node
        process.spawn(lambda: begin(daemon), "main")

    def kill(self, daemon: Daemon) -> None:
        """SIGKILL."""
        process, daemon.process = daemon.process, None
        if process is not None:
            process.die()

    def _run_master(self, daemon: Daemon) -> None:
        settings = MasterSettings(
            listen=f"{daemon.host.name}:{PORT}",
            run_dir=f"{RUN_DIR}/master",
            catalog="etcd://etcd:2379",
            reserve_ttl_s=RESERVE_TTL_S,
            heartbeat_interval_s=0.5,
            node_ttl_s=NODE_TTL_S,
            slow_start_s=0.0,
            forget_node_s=6.0,
            repair_after_s=2.0,
            command_timeout_s=2.0,
            control_timeout_s=2.0,
            peer_timeout_s=PEER_TIMEOUT_S,
            max_kept_removals=self.shape.max_kept_removals,
            hot_copies=self.shape.hot_copies,
            hot_reads_per_s=HOT_READS_PER_S,
            partitions=self.shape.partitions,
            share_settle_s=1.0,
            share_pause_s=0.3,
            allow_unauthenticated=True,
            http="",
        )
        try:
            master = daemon.master = Master(settings)
        except CatalogUnavailable:
            process = self.world.here
            self.world.after(START_AGAIN_NS, lambda: self._start_again(daemon, process))
            return
        master.start()

    def _start_again(self, daemon: Daemon, process: Process) -> None:
        """Supervise a master: restart it after an exit of its own. A master exits if it finds no catalog at its start."""
        if daemon.process is process:
            self.kill(daemon)
            self.start_daemon(daemon)

    def _run_node(self, daemon: Daemon) -> None:
        settings = NodeSettings(
            master=self.addresses,
            listen=f"{daemon.host.name}:{PORT + 10}",
            name=daemon.name,
            run_dir=f"{RUN_DIR}/node",
            dram=Size(self.shape.dram_bytes),
            nvme=f"{daemon.name}:{self.shape.nvme_bytes}" if self.shape.nvme_bytes else "",
            policy=self.shape.policy,
            allow_unauthenticated=True,
            http="",
            put_ttl_s=PUT_TTL_S,
            control_timeout_s=1.0,
            owner_patience_s=0.5,
            peer_timeout_s=PEER_TIMEOUT_S,
            reconnect_interval_s=0.1,
            reconnect_max_interval_s=0.5,
            copy_timeout_s=3.0,
            compare_from_blocks=1,
        )
        daemon.node = Node(settings)
        daemon.node.start()

    def _open_tiers(self, settings: NodeSettings, _plan: object) -> dict[int, Any]:
        process = self.world.here
        dram = DramTier(settings.dram, transparent_hugepages=False)
        tiers: dict[int, Any] = {DRAM: dram}
        if settings.nvme:
            daemon = next(daemon for daemon in self.nodes if daemon.name == settings.name)
            tiers[NVME] = DiskTier(daemon.disk, capacity_bytes=self.shape.nvme_bytes)
        closed: list[bool] = []

        def close() -> None:
            if not closed:
                closed.append(True)
                dram.close()

        process.on_death.append(close)
        self.world.at_end.append(close)
        return tiers

    # --- what is so, past the product's interfaces: for checks ---

    def owner(self, partition: int) -> Partition | None:
        """The partition at the master that serves as its owner, in its own view and in etcd's."""
        etcd = self.etcds[partition]
        if self.world.now_ns >= etcd.lease_until_ns:
            return None
        for daemon in self.masters:
            master = daemon.master
            if daemon.process is not None and master is not None and not daemon.process.is_stopped and etcd.owner is not None:
                told = role_in(master.partitions[partition])
                if told.role == "owner" and told.epoch == etcd.owner.epoch:
                    return master.partitions[partition]
        return None

    def owners(self) -> list[Partition]:
        """Of each partition, at the master that owns it; fewer where one has no owner."""
        found = [self.owner(partition) for partition in range(self.shape.partitions)]
        return [one for one in found if one is not None]

    def record(self, tenant: str, key: bytes) -> tuple[Any, ...] | None:
        """Return the record of a block in etcd."""
        return self.etcds[partition_of(key, self.shape.partitions)].blocks.get((tenant, key))

    def blocks_at(self, daemon: Daemon) -> dict[tuple[str, bytes], Block]:
        """Return the blocks that a live node can serve, committed or not."""
        if daemon.process is None or daemon.node is None:
            return {}
        return {(block.tenant, block.key): block for block in daemon.node._storage.table.blocks()}

    def decided_at(self, daemon: Daemon) -> dict[tuple[str, bytes], Block]:
        return {place: block for place, block in self.blocks_at(daemon).items() if block.generation != UNCOMMITTED}


class ClientProcess:
    """A process with a client for each tenant. Operations run in its threads."""

    def __init__(self, cluster: Cluster, index: int, host: Host) -> None:
        self.cluster, self.index, self.host = cluster, index, host
        self.starts = 0
        self.process: Process
        self.clients: dict[str, Client] = {}
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.process = self.cluster.world.start(self.host, f"client-{self.index}.{self.starts}")
        self.clients = {}

    def client(self, tenant: str) -> Client:
        """In a thread of this process."""
        client = self.clients.get(tenant)
        if client is None:
            settings = ClientSettings(
                max_channels=1000,
                connect_timeout_s=0.5,
                owner_patience_s=0.5,
                peer_timeout_s=PEER_TIMEOUT_S,
                use_index=self.cluster.shape.uses_index,
                put_inline_bytes=1024,
                get_inline_bytes=1024,
                copy_threads=1,
                busy_poll_us=0,
            )
            client = self.clients[tenant] = Client(
                self.cluster.addresses.split(","),
                tenant=tenant,
                deadline_s=3.0,
                settings=settings,
                tracing=TracingSettings(),  # without, each would look through the environment: slow, and no part of a seed
            )
            clocks_of(client, self.process)
        return client
