"""Storage of a node: makes tiers, block table, mover, puts, reads and replicas, all on one reactor.

It knows no connections and no masters (node.py). Periodic work is in periodic_tasks.py.
"""

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from kvstore.protocol.errors import Broken, ConfigError, ProtocolError
from kvstore.rpc.address import parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Session
from kvstore.rpc.unix_socket import SocketAccess
from kvstore.security.listen_address import is_loopback
from kvstore.security.tls.certificates import Certificates
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.leases import Leases
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.rows import BlockRows
from kvstore.store.block_table.table import BlockTable, TableRules
from kvstore.store.block_table.tags import from_recovered
from kvstore.store.config import NodeSettings, split_location
from kvstore.store.memory_plan import MemoryPlan, check_limit, plan_memory
from kvstore.store.reads.expected_prefetches import ExpectedPrefetches
from kvstore.store.reads.prefetcher import Prefetcher
from kvstore.store.reads.read_service import ReadService
from kvstore.store.replication.event_replicator import EventReplicator, EventReplicators
from kvstore.store.replication.last_replica import LastReplicaQueries
from kvstore.store.replication.replica_queue import ReplicaQueue
from kvstore.store.shared_index.index_writer import SharedIndexWriter
from kvstore.store.shared_regions import SharedRegions
from kvstore.store.tiering.drainer import Drainer, NvmeSaver
from kvstore.store.tiering.mover import TierMover
from kvstore.store.tiering.prefaulter import PageSizes, Prefaulter
from kvstore.store.wait_queue import WaitQueue
from kvstore.store.writes.checksums import ChecksumVerifier
from kvstore.store.writes.commit_batcher import CommitBatcher
from kvstore.store.writes.commit_requests import CommitRequests, CommitWaits
from kvstore.store.writes.in_place_puts import InPlacePuts
from kvstore.store.writes.slot_requests import SlotAllocator
from kvstore.store.writes.socket_puts import SocketPuts
from kvstore.tiers.dram import DramTier
from kvstore.tiers.memory_limit import memory_limit
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.policies.by_name import make_family
from kvstore.tiers.tier import Tier
from kvstore.tiers.value_codec import Encoding, make_codec, require_torch
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.rails import chosen_transports
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import LOOPBACK, Topology

PREFAULT_STEP_BYTES: Final = 64 << 20
"""Bytes of DRAM touched at once by the prefault thread."""
PUBLISH_BATCH_EVENTS: Final = 4096
"""Events in one message to the master."""
PUBLISH_IN_FLIGHT: Final = 4
"""Unanswered messages to the master."""
SHUTDOWN_TIMEOUT_S: Final = 5.0
"""Time for the prefault thread to end at shutdown."""

log = logging.getLogger("kvstore.store")

WILDCARDS: Final = ("0.0.0.0", "::")

SAVED_BATCHES = 4
"""Batches of `move_batch` planned at once by a drain: the mover stays busy, and few are unwritten at the deadline."""


def make_engine(transfer: TransferSettings, instance: int, *, listens_on: str, tls: Certificates | None = None) -> TransferEngine | None:
    """Make the transfer engine of process `instance`, for clients of other hosts. Returns None, with a warning, if the
    network interfaces cannot be read. Raises ConfigError for invalid settings."""
    try:
        topology = Discovery.configured(transfer).read_topology()
    except Broken as error:
        log.warning("no transfer engine: the topology of this host is unknown: %s", error)
        return None
    settings = engine_settings(transfer, topology, listens_on=listens_on, is_tls=tls is not None)
    return TransferEngine(f"node-{instance:x}", settings, topology=topology, tls=tls)


def engine_settings(transfer: TransferSettings, topology: Topology, *, listens_on: str, is_tls: bool = False) -> TransferSettings:
    """Return the engine's settings. Local clients map slabs, so shm is excluded. A node on loopback has its engine on
    loopback."""
    names = [name for name in chosen_transports(transfer, topology, is_tls=is_tls) if name != "shm"]
    loopback = next((nic.name for nic in topology.nics if nic.kind == LOOPBACK), "")
    return replace(transfer, rails=transfer.rails or (loopback if is_loopback(listens_on) else ""), transports=",".join(names) or "tcp")


def check(settings: NodeSettings) -> None:
    """Raises ConfigError or InvalidArgument for contradictory settings or invalid addresses."""
    if settings.low_watermark > settings.high_watermark:
        raise ConfigError("low_watermark is above high_watermark: set it at most as high")
    if settings.nvme_codec != "none" and not settings.nvme:
        raise ConfigError(f"nvme_codec is {settings.nvme_codec!r}, but there is no NVMe tier: set nvme to DIR:SIZE")
    if parse_address(settings.listen).unix:
        raise ConfigError(f"listen is {settings.listen!r}: use HOST:PORT; the Unix socket is created in run_dir")
    if parse_address(settings.listen).host in WILDCARDS and not settings.advertise:
        raise ConfigError(f"listen {settings.listen} is every interface: set advertise to the HOST:PORT that clients connect to")
    if settings.advertise and parse_address(settings.advertise).unix:
        raise ConfigError(f"advertise is {settings.advertise!r}: use HOST:PORT, for clients of other hosts")
    SocketAccess.chosen(settings.socket_group, settings.socket_mode)


def open_tiers(settings: NodeSettings, plan: MemoryPlan) -> dict[int, Tier]:
    """Open the configured tiers; return them by index. Raises ConfigError, also if the plan exceeds the memory limit;
    no tier stays open then."""
    tiers: dict[int, Tier] = {}
    try:
        dram = DramTier(plan.dram_bytes, hugepages=settings.hugepages)
        tiers[DRAM] = dram
        check_limit(settings, plan, memory_limit(), has_reserved_pages=dram.hugepages)
        if settings.nvme:
            folder, size_bytes = split_location(settings.nvme, "nvme")
            is_new = not os.path.exists(folder)  # Path.exists raises where a directory above may not be entered
            tiers[NVME] = NvmeTier(folder, capacity_bytes=size_bytes)
            if is_new and os.stat(folder).st_dev == os.stat("/").st_dev:
                log.warning("created the NVMe folder %s on the root file system: if a disk belongs there, mount it and restart", folder)
        if settings.hbm:
            from kvstore.tiers.hbm import HbmTier  # torch takes seconds to import, and most nodes have no HBM tier

            device, size_bytes = split_location(settings.hbm, "hbm")
            tiers[HBM] = HbmTier(size_bytes, device)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def readable_blocks(tier: Tier, rows: BlockRows) -> list[Block]:
    """Return the recovered blocks of a durable tier, made by `rows`. A value with an invalid tag is freed. Raises
    ConfigError: there are encoded values and no codec."""
    blocks = []
    for found in tier.recover():
        try:
            blocks.append(from_recovered(found, rows))
        except ProtocolError as error:
            log.warning("dropped a stored block with an invalid tag: %s", error)
            tier.free(found.slot)
    if any(loss is not None and loss.encoding is not None for block in blocks for loss in block.lossy):
        require_torch(f"what the {tier.name} tier holds is encoded, and is decoded")
    return blocks


def disconnect_stalled_reader(owner: object) -> None:
    """Close the connection of a client whose hazard pointer has blocked a slot for longer than a lease may last."""
    assert isinstance(owner, Session)
    owner.close("the client's hazard pointer blocked a slot for longer than max_lease_s")


class Storage:
    """Parts of a node's storage, for node.py. Used in the reactor's thread."""

    def __init__(
        self,
        settings: NodeSettings,
        reactor: Reactor,
        opened: ExitStack,
        *,
        transfer: TransferSettings,
        instance: int,
        tls: Certificates | None,
    ) -> None:
        """Open the tiers and recover NVMe. `opened` closes what is open if a later step fails. Raises ConfigError,
        TierFailed."""
        self._settings = settings
        self._reactor = reactor
        self.partition_map = PartitionMap()
        self.codec = make_codec(settings.nvme_codec)
        self._open(opened, transfer, instance, tls)
        self._assemble(tls)

    def _open(self, opened: ExitStack, transfer: TransferSettings, instance: int, tls: Certificates | None) -> None:
        """Open tiers and engine; make the table with recovered blocks."""
        settings = self._settings
        self.memory = plan_memory(settings)
        self._tiers = open_tiers(settings, self.memory)
        for tier in self._tiers.values():
            opened.callback(tier.close)
        self.engine = make_engine(transfer, instance, listens_on=parse_address(settings.listen).host, tls=tls)
        if self.engine is not None:
            opened.callback(self.engine.close)
        dram = self._tiers[DRAM]
        assert isinstance(dram, DramTier)
        self.dram = dram
        interval_s = settings.claim_interval_s
        self.replicators = EventReplicators(
            lambda: self.table.blocks(),
            self.partition_map,
            lambda parts: EventReplicator(
                parts,
                batch_events=PUBLISH_BATCH_EVENTS,
                max_in_flight=PUBLISH_IN_FLIGHT,
                later=(lambda callback: self._reactor.call_later(interval_s, callback)) if interval_s else None,
                soon=self._reactor.call_soon,
                compare_from_blocks=settings.compare_from_blocks,
                prompts=lambda blocks: self.table.prompts.of(blocks),
            ),
        )
        capacities = {index: tier.capacity_bytes for index, tier in self._tiers.items()}
        holds = Holds(capacities, max_ns=int(settings.max_lease_s * 1e9))
        self.shared_index = SharedIndexWriter(
            dram, holds, max_hazard_ns=int(settings.max_lease_s * 1e9), disconnect=disconnect_stalled_reader
        )
        opened.callback(self.shared_index.close)
        self.table = BlockTable(
            self._tiers,
            TableRules(
                make_family=lambda: make_family(settings.policy),
                put_ttl_ns=int(settings.put_ttl_s * 1e9),
                high_watermark=settings.high_watermark,
                low_watermark=settings.low_watermark,
                write_worth=settings.write_worth,
                max_table_bytes=self.memory.table_bytes,
                encoding_of=self._encoding if self.codec is not None else None,
            ),
            emit=self.replicators.emit,
            events=BlockEventLog(lambda: time.time_ns() // 1000),
            shared_index=self.shared_index,
            partition_map=self.partition_map,
            holds=holds,
        )
        if NVME in self._tiers:
            found = self.table.recover(readable_blocks(self._tiers[NVME], self.table.rows))
            log.info("recovered %d blocks from NVMe", found)

    def _assemble(self, tls: Certificates | None) -> None:
        """Make the services that work on the table."""
        settings, reactor, dram = self._settings, self._reactor, self.dram
        self.waiting = WaitQueue(max_of_owner=settings.peer_requests)
        self.leases = Leases(self.table.copies.release)
        self.mover = TierMover(
            reactor,
            self.table,
            self._tiers,
            settings=settings,
            on_space_freed=self._space_freed,
            codec=self.codec,
        )
        self.prefetcher = Prefetcher(reactor, self.table, dram, self.mover, self.waiting)
        self.expected_prefetches = ExpectedPrefetches(self.prefetcher)
        self.commit_waits = CommitWaits()
        self.commit_requests = CommitRequests(self.table, self.commit_waits, self.replicators, self.partition_map)
        self.commit_batcher = CommitBatcher(
            reactor,
            self.table,
            self.replicators,
            self.commit_waits,
            interval_s=settings.claim_interval_s,
            on_space_freed=self.waiting.retry,
        )
        self.regions = SharedRegions(dram, self.engine) if self.engine is not None else None
        slots = SlotAllocator(self.table, self.waiting, demotion_wait_s=settings.demotion_wait_s)
        self._verifier = ChecksumVerifier(reactor)
        self.in_place_puts = InPlacePuts(self.table, dram, self.replicators, slots, self.commit_waits, self._verifier, self.regions)
        self.socket_puts = SocketPuts(self.table, dram, self.replicators, slots, self.commit_waits, self.commit_requests, self._verifier)
        self.reads = ReadService(
            self.table,
            dram,
            self.mover,
            self.leases,
            self.prefetcher,
            settings=settings,
            has_engine=self.engine is not None,
        )
        self.replica_queue = ReplicaQueue(
            reactor,
            self.table,
            dram,
            self.waiting,
            settings=settings,
            engine=self.engine,
            tls=tls,
        )
        self.victim_queries = LastReplicaQueries(self.table.lowest, self.partition_map, clock_ns=reactor.now_ns)
        saver = NvmeSaver(
            self.table, batch_bytes=SAVED_BATCHES * settings.move_batch, has_master_link=lambda: self.commit_batcher.has_master
        )
        self.drainer = Drainer(saver, has_nvme=NVME in self._tiers, clock_ns=reactor.now_ns)
        self.pages = PageSizes(dram)
        self.prefaulter = Prefaulter(reactor, dram, self.pages, step_bytes=PREFAULT_STEP_BYTES)

    def close(self) -> None:
        """Wait for moves in progress and close the tiers. All users of the memory must be disconnected: clients,
        masters, other nodes' engines."""
        self.replica_queue.close()
        self._verifier.close()
        self.mover.close()
        self.prefaulter.join(SHUTDOWN_TIMEOUT_S)
        for tier in self._tiers.values():
            tier.close()

    def _space_freed(self) -> None:
        """Serve what waits for slots: puts before prefetches."""
        self.waiting.retry()
        self.prefetcher.step()

    def add_partitions(self) -> None:
        """Split events and commit requests by partition."""
        self.replicators.add_partitions()
        self.table.uncommitted.regroup()

    def _encoding(self, block: Block) -> Encoding | None:
        """Return the encoding of a DRAM block in NVMe, or None."""
        slot = block.dram
        assert slot is not None
        assert self.codec is not None
        return self.codec.encoding(self.dram.view(slot))
