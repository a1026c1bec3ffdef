"""What a node has blocks in and works on them with: tiers, table, copies between tiers, puts, reads, replicas, all on one reactor.

It makes them in the order in which they need one another. It knows no connection and no master: node.py does. What goes on by itself
is in periodic_tasks.py.
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
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.rows import BlockRows
from kvstore.store.block_table.table import BlockTable, TableRules
from kvstore.store.block_table.tags import from_recovered
from kvstore.store.config import NodeSettings, split_place
from kvstore.store.memory_plan import MemoryPlan, check_limit, plan_memory
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
from kvstore.tiers.policies.by_name import make_policy
from kvstore.tiers.tier import Tier
from kvstore.tiers.value_codec import Encoding, make_codec, require_torch
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.rails import chosen_transports
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import LOOPBACK, Topology

PREFAULT_STEP_BYTES: Final = 64 << 20
"""Bytes of DRAM that the prefault thread touches at once."""
PUBLISH_BATCH_EVENTS: Final = 4096
"""Events in one message to the master."""
PUBLISH_IN_FLIGHT: Final = 4
"""Messages to the master that may wait for their answer."""
SHUTDOWN_TIMEOUT_S: Final = 5.0
"""Time that copies under way get at the end."""

log = logging.getLogger("kvstore.store")

WILDCARDS: Final = ("0.0.0.0", "::")

SAVED_BATCHES = 4
"""Batches of `move_batch` that are planned at once when memory is written down: the mover always has one, and no more than these are
written yet when the time is over."""


def make_engine(transfer: TransferSettings, instance: int, *, listens_on: str, tls: Certificates | None = None) -> TransferEngine | None:
    """The engine of the node's process `instance`, which serves clients of other hosts. None, and a warning, where the system does not
    tell its network interfaces. Raises ConfigError for settings that cannot be met."""
    try:
        topology = Discovery.configured(transfer).look()
    except Broken as error:
        log.warning("no transfer engine: the topology of this host is unknown: %s", error)
        return None
    settings = engine_settings(transfer, topology, listens_on=listens_on, is_tls=tls is not None)
    return TransferEngine(f"node-{instance:x}", settings, topology=topology, tls=tls)


def engine_settings(transfer: TransferSettings, topology: Topology, *, listens_on: str, is_tls: bool = False) -> TransferSettings:
    """A node's engine serves other hosts: clients of this one map its slabs. Where the node is not to be reached from outside, its engine
    is not either."""
    names = [name for name in chosen_transports(transfer, topology, is_tls=is_tls) if name != "shm"]
    loopback = next((nic.name for nic in topology.nics if nic.kind == LOOPBACK), "")
    return replace(transfer, rails=transfer.rails or (loopback if is_loopback(listens_on) else ""), transports=",".join(names) or "tcp")


def check(settings: NodeSettings) -> None:
    """Raises ConfigError or InvalidArgument for settings that contradict one another, or addresses that are none."""
    if settings.low_watermark > settings.high_watermark:
        raise ConfigError("low_watermark is above high_watermark: blocks could never be demoted far enough")
    if settings.nvme_codec != "none" and not settings.nvme:
        raise ConfigError(f"nvme_codec is {settings.nvme_codec!r}, but there is no NVMe tier: say with nvme DIR:SIZE where it is")
    if parse_address(settings.listen).unix:
        raise ConfigError(f"listen is {settings.listen!r}: write HOST:PORT; the Unix socket is made in run_dir")
    if parse_address(settings.listen).host in WILDCARDS and not settings.advertise:
        raise ConfigError(f"listen {settings.listen} is every interface: say with advertise HOST:PORT where clients reach this node")
    if settings.advertise and parse_address(settings.advertise).unix:
        raise ConfigError(f"advertise is {settings.advertise!r}: write HOST:PORT, for clients of other hosts")
    SocketAccess.chosen(settings.socket_group, settings.socket_mode)


def open_tiers(settings: NodeSettings, plan: MemoryPlan) -> dict[int, Tier]:
    """The tiers that are configured, by index. Raises ConfigError, also where the plan exceeds the memory limit; those already opened are
    closed then."""
    tiers: dict[int, Tier] = {}
    try:
        dram = DramTier(plan.dram_bytes, hugepages=settings.hugepages)
        tiers[DRAM] = dram
        check_limit(settings, plan, memory_limit(), has_reserved_pages=dram.hugepages)
        if settings.nvme:
            folder, size_bytes = split_place(settings.nvme, "nvme")
            is_new = not os.path.exists(folder)  # Path.exists raises where a directory above may not be entered
            tiers[NVME] = NvmeTier(folder, capacity_bytes=size_bytes)
            if is_new and os.stat(folder).st_dev == os.stat("/").st_dev:
                log.warning("the NVMe folder %s is new, and on the disk of /: if one of its own was to be mounted there, it is not", folder)
        if settings.hbm:
            from kvstore.tiers.hbm import HbmTier  # torch takes seconds to import, and most nodes have no HBM tier

            device, size_bytes = split_place(settings.hbm, "hbm")
            tiers[HBM] = HbmTier(size_bytes, device)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def readable_blocks(tier: Tier, rows: BlockRows) -> list[Block]:
    """What a durable tier held, as blocks that `rows` made; a value whose tag cannot be read is given up.

    Raises ConfigError: there are encoded values, and nothing that could decode them.
    """
    blocks = []
    for found in tier.recover():
        try:
            blocks.append(from_recovered(found, rows))
        except ProtocolError as error:
            log.warning("a stored block is given up: %s", error)
            tier.free(found.slot)
    if any(loss is not None and loss.encoding is not None for block in blocks for loss in block.lossy):
        require_torch(f"what the {tier.name} tier holds is encoded, and is decoded")
    return blocks


def hang_up_on_looker(owner: object) -> None:
    """Its client has looked at something for longer than a lease may last, and it was in the way."""
    assert isinstance(owner, Session)
    owner.close("the client looked at a value for longer than max_lease_s")


class Storage:
    """See the module. Its parts are for the thread that runs the reactor; who has them is node.py."""

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
        """Open the tiers, and recover what NVMe holds; `opened` closes what is open if the rest of the node cannot be made.

        Raises ConfigError, TierFailed.
        """
        self._settings = settings
        self._reactor = reactor
        self.partitioning = Partitioning()
        self.codec = make_codec(settings.nvme_codec)
        self._open(opened, transfer, instance, tls)
        self._assemble(tls)

    def _open(self, opened: ExitStack, transfer: TransferSettings, instance: int, tls: Certificates | None) -> None:
        """Tiers, engine, and the table with what NVMe held."""
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
        self.publishers = EventReplicators(
            lambda: self.table.blocks(),
            self.partitioning,
            lambda parts: EventReplicator(
                parts,
                batch_events=PUBLISH_BATCH_EVENTS,
                max_in_flight=PUBLISH_IN_FLIGHT,
                later=(lambda callback: self._reactor.call_later(interval_s, callback)) if interval_s else None,
                soon=self._reactor.call_soon,
                compare_from_blocks=settings.compare_from_blocks,
            ),
        )
        capacities = {index: tier.capacity_bytes for index, tier in self._tiers.items()}
        holds = Holds(capacities, max_ns=int(settings.max_lease_s * 1e9))
        self.showing = SharedIndexWriter(dram, holds, max_look_ns=int(settings.max_lease_s * 1e9), hang_up=hang_up_on_looker)
        opened.callback(self.showing.close)
        self.table = BlockTable(
            self._tiers,
            TableRules(
                make_policy=lambda: make_policy(settings.policy),
                put_ttl_ns=int(settings.put_ttl_s * 1e9),
                high_watermark=settings.high_watermark,
                low_watermark=settings.low_watermark,
                max_table_bytes=self.memory.table_bytes,
                encoding_of=self._encoding if self.codec is not None else None,
            ),
            emit=self.publishers.emit,
            events=BlockEventLog(lambda: time.time_ns() // 1000),
            showing=self.showing,
            partitioning=self.partitioning,
            holds=holds,
        )
        if NVME in self._tiers:
            found = self.table.recover(readable_blocks(self._tiers[NVME], self.table.rows))
            log.info("recovered %d blocks from NVMe", found)

    def _assemble(self, tls: Certificates | None) -> None:
        """What works on the table: copies between tiers, puts, reads, replicas."""
        settings, reactor, dram = self._settings, self._reactor, self.dram
        self.waiting = WaitQueue(max_of_owner=settings.peer_requests)
        self.leases = Leases(self.table.copies.release)
        self.mover = TierMover(
            reactor,
            self.table,
            self._tiers,
            settings=settings,
            on_room=self.waiting.retry,
            codec=self.codec,
        )
        self.answers = CommitWaits()
        self.claims = CommitRequests(self.table, self.answers, self.publishers, self.partitioning)
        self.deciding = CommitBatcher(
            reactor,
            self.table,
            self.publishers,
            self.answers,
            interval_s=settings.claim_interval_s,
            on_room=self.waiting.retry,
        )
        self.regions = SharedRegions(dram, self.engine) if self.engine is not None else None
        slots = SlotAllocator(self.table, self.waiting, demotion_wait_s=settings.demotion_wait_s)
        self._checker = ChecksumVerifier(reactor)
        self.in_place = InPlacePuts(self.table, dram, self.publishers, slots, self.answers, self._checker, self.regions)
        self.sent = SocketPuts(self.table, dram, self.publishers, slots, self.answers, self.claims, self._checker)
        self.reads = ReadService(
            self.table,
            dram,
            self.mover,
            self.leases,
            settings=settings,
            has_engine=self.engine is not None,
        )
        self.copies = ReplicaQueue(
            reactor,
            self.table,
            dram,
            self.waiting,
            settings=settings,
            engine=self.engine,
            tls=tls,
        )
        self.last_copies = LastReplicaQueries(self.table.lowest, self.partitioning, clock_ns=reactor.now_ns)
        saver = NvmeSaver(self.table, batch_bytes=SAVED_BATCHES * settings.move_batch, may_be_decided=lambda: self.deciding.has_master)
        self.leaving = Drainer(saver, has_nvme=NVME in self._tiers, clock_ns=reactor.now_ns)
        self.pages = PageSizes(dram)
        self.prefaulter = Prefaulter(reactor, dram, self.pages, step_bytes=PREFAULT_STEP_BYTES)

    def close(self) -> None:
        """Let copies under way end, and close the tiers. For when all who use the memory have been hung up on: clients, masters, and other
        nodes' engines."""
        self.copies.close()
        self._checker.close()
        self.mover.close()
        self.prefaulter.join(SHUTDOWN_TIMEOUT_S)
        for tier in self._tiers.values():
            tier.close()

    def cut(self) -> None:
        """There are several partitions: each has events and claims of its own."""
        self.publishers.cut()
        self.table.undecided.regroup()

    def _encoding(self, block: Block) -> Encoding | None:
        """What a block of DRAM will be in NVMe, if it is encoded on its way."""
        slot = block.dram
        assert slot is not None
        assert self.codec is not None
        return self.codec.encoding(self.dram.view(slot))
