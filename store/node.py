"""A storage node put together: tiers, table, services, server and the link to the master, on one reactor.

It owns all of them and the order in which they start and stop. It does not read settings files or print: daemon.py does.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Broken, ConfigError
from kvstore.protocol.extras import DISTRIBUTION
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.outbox import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Server, default_run_dir
from kvstore.store.blocks.block import DRAM, NVME, Block
from kvstore.store.blocks.events import EventLog
from kvstore.store.blocks.leases import Leases
from kvstore.store.blocks.table import BlockTable
from kvstore.store.config import NodeSettings, max_table_bytes
from kvstore.store.engine import make_engine
from kvstore.store.link import Identity, MasterLink, new_instance
from kvstore.store.mastering import MasterSession
from kvstore.store.moves.mover import TierMover
from kvstore.store.naming import NodeName
from kvstore.store.opening import check, open_tiers, readable_blocks
from kvstore.store.publisher import Publisher
from kvstore.store.puts.answering import Answers
from kvstore.store.puts.claims import Claims
from kvstore.store.puts.in_place import InPlacePuts
from kvstore.store.puts.sent import SentPuts
from kvstore.store.puts.slots import Slots
from kvstore.store.reads.reads import ReadService
from kvstore.store.reads.turns import ReadTurns
from kvstore.store.regions import SharedRegions
from kvstore.store.replicas.queue import ReplicaQueue
from kvstore.store.service import NodeService
from kvstore.store.status import NodeStatus
from kvstore.store.waiting import WaitingRoom
from kvstore.tiers.dram import DramTier
from kvstore.tiers.policies.by_name import make_policy
from kvstore.tiers.value_codec import Encoding, make_codec
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import dump_topology
from kvstore.transfer.topology.links import LinkChange, LinkWatch
from kvstore.transfer.topology.model import Topology

WILDCARDS = ("0.0.0.0", "::")
TICK_S = 0.1
"""How often leases, open puts and waiting requests are looked at for their deadlines."""
FLUSH_INTERVAL_S = 1.0
"""How often queued deletions are written down in a tier that nothing else is written to."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a started node can be reached."""

    name: str
    tcp: str
    unix: str


class Node:
    """See the module. All methods but `prefault` belong to the thread that calls `reactor.run`."""

    def __init__(self, settings: NodeSettings, transfer: TransferSettings | None = None) -> None:
        """Open the tiers and recover what NVMe holds. Raises ConfigError; nothing is left open then."""
        check(settings)
        self._settings = settings
        self._transfer = transfer or TransferSettings()
        self._masters = [parse_address(text.strip()) for text in settings.master.split(",")]
        self._codec = make_codec(settings.nvme_codec)
        self._tiers = open_tiers(settings)
        self._instance = new_instance()
        self._engine: TransferEngine | None = None
        try:
            self._engine = make_engine(self._transfer, self._instance, listens_on=parse_address(settings.listen).host)
            self._assemble()
        except BaseException:
            if self._engine is not None:
                self._engine.close()
            for tier in self._tiers.values():
                tier.close()
            raise

    def _assemble(self) -> None:
        settings = self._settings
        dram = self._tiers[DRAM]
        assert isinstance(dram, DramTier)
        self._dram = dram
        self._publisher = Publisher(self._visible, batch_events=settings.publish_batch, max_in_flight=settings.publish_in_flight)
        self._table = BlockTable(
            self._tiers,
            make_policy=lambda: make_policy(settings.policy),
            emit=self._publisher.emit,
            events=EventLog(lambda: time.time_ns() // 1000),
            put_ttl_ns=int(settings.put_ttl_s * 1e9),
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
            encoding_of=self._encoding if self._codec is not None else None,
            max_table_bytes=max_table_bytes(settings),
        )
        if NVME in self._tiers:
            found = self._table.recover(readable_blocks(self._tiers[NVME]))
            log.info("recovered %d blocks from NVMe", found)
        self.reactor = Reactor()
        self._waiting = WaitingRoom(max_of_owner=settings.peer_requests)
        self._leases = Leases(self._table.release)
        self._mover = TierMover(
            self.reactor,
            self._table,
            self._tiers,
            batch_bytes=settings.move_batch,
            read_threads=settings.read_threads,
            tier_retry_s=settings.tier_retry_s,
            on_room=self._waiting.retry,
            codec=self._codec,
        )
        self._answers = Answers()
        self._claims = Claims(self._table, self._answers, self._publisher)
        self._regions = SharedRegions(dram, self._engine) if self._engine is not None else None
        slots = Slots(self._table, self._waiting)
        self._in_place = InPlacePuts(self._table, dram, self._publisher, slots, self._answers, self._regions)
        self._sent = SentPuts(self._table, dram, self._publisher, slots, self._answers, self._claims)
        self._reads = ReadService(
            self._table,
            dram,
            self._mover,
            self._leases,
            ReadTurns(node_bytes=settings.read_bytes, peer_bytes=settings.peer_bytes),
            WaitingRoom(max_of_owner=settings.peer_requests),
            max_lease_ns=int(settings.max_lease_s * 1e9),
            answer_bytes=settings.peer_bytes,
            has_engine=self._engine is not None,
        )
        self._copies = ReplicaQueue(
            self.reactor,
            self._table,
            dram,
            self._waiting,
            batch_bytes=settings.copy_batch,
            queue_blocks=settings.copy_queue,
            timeout_s=settings.copy_timeout_s,
        )
        self._status = NodeStatus(
            self._table,
            self._in_place,
            self._sent,
            self._reads,
            self._leases,
            self._waiting,
            self._copies,
            self._publisher,
            self._engine,
            codec_name=self._codec.name if self._codec is not None else "",
            max_table_bytes=max_table_bytes(settings),
            connections=lambda: len(self._server.sessions) if self._server is not None else 0,
        )
        self._stop_prefault = threading.Event()
        self._server: Server | None = None
        self._link: MasterLink | None = None
        self._watch: LinkWatch | None = None
        self._master: MasterSession | None = None
        self._name: NodeName | None = None
        self._prefaulter: threading.Thread | None = None
        self.on_synced: Callable[[], None] = lambda: None
        """Called each time the master knows the whole inventory."""

    def start(self) -> Places:
        """Listen, look for the master, and set the clockwork going. Raises ConfigError when an address cannot be had."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        if listen.host in WILDCARDS and not settings.advertise:
            raise ConfigError(f"listen {settings.listen} is every interface: say with advertise HOST:PORT where clients reach this node")
        self._service = NodeService(
            self._table,
            self._dram,
            self._mover,
            self._leases,
            self._waiting,
            self._in_place,
            self._sent,
            self._reads,
            self._regions,
            self._copies,
            instance=self._instance,
        )
        limits = SendLimits(settings.peer_bytes, settings.send_timeout_s)
        self._server = Server(
            self.reactor,
            self._service,
            max_connections=settings.max_connections,
            limits=limits,
            hello_timeout_s=settings.hello_timeout_s,
            max_strangers=settings.max_strangers,
            peer_timeout_s=settings.peer_timeout_s,
        )
        tcp = self._server.listen_tcp(listen.host, listen.port)
        port = tcp.rpartition(":")[2]
        run_dir = Path(settings.run_dir) if settings.run_dir else default_run_dir()
        unix = self._server.listen_unix(run_dir / f"node-{port}.sock")
        self._name = NodeName(settings, socket.gethostname(), tcp, run_dir)
        name = self._name.text
        self._service.name, self._service.unix_path, self._service.host_id = name, unix, socket_id(unix)
        places = Places(name, settings.advertise or tcp, unix)
        self._master = MasterSession(
            self.reactor,
            self._service,
            self._publisher,
            self._claims,
            self._copies,
            peer_timeout_s=settings.peer_timeout_s,
            on_synced=lambda: self.on_synced(),
            on_lost=self._on_link_lost,
        )
        self._link = MasterLink(
            self.reactor,
            self._masters,
            Identity(name, version(DISTRIBUTION), self._service.host_id, unix, places.tcp, self._instance),
            tier_status=self.status,
            on_link=self._master.begin,
            timeout_s=settings.control_timeout_s,
            pause_s=settings.reconnect_interval_s,
            max_pause_s=settings.reconnect_max_interval_s,
        )
        self._watch = self._watch_links(self._link)
        self.reactor.after_events += [self._mover.kick, self._publisher.flush]
        self.reactor.every(TICK_S, self._tick)
        self.reactor.every(FLUSH_INTERVAL_S, self._mover.flush)
        self.reactor.every(FLUSH_INTERVAL_S, self._reads.tidy)
        self._link.start()
        return places

    def _watch_links(self, link: MasterLink) -> LinkWatch | None:
        """Have the master know this host's topology, as it is at any time. None, and a warning, where the system does not tell it."""

        engine = self._engine

        def changed(topology: Topology, changes: list[LinkChange]) -> None:
            if engine is not None:
                engine.refresh(topology)
            link.describe(topology=dump_topology(topology), transfer=engine.describe() if engine is not None else b"")

        try:
            watch = LinkWatch(Discovery.configured(self._transfer).look, changed, poll_interval_s=self._transfer.link_poll_interval_s)
        except Broken as error:
            log.warning("the topology of this host is unknown: %s", error)
            return None
        changed(watch.topology, [])
        watch.start()
        return watch

    def prefault(self, on_done: Callable[[], None]) -> None:
        """Touch all of DRAM once, in a thread: fresh memory is ten times slower to write. `on_done` runs in the loop."""

        def work() -> None:
            while not self._stop_prefault.is_set():
                if not self._dram.prefault_step(self._settings.prefault_step):
                    self.reactor.call_soon(on_done)
                    return

        self._prefaulter = threading.Thread(target=work, name="prefault", daemon=True)
        self._prefaulter.start()

    def close(self) -> None:
        """Hang up, let copies under way end, close the tiers."""
        self._stop_prefault.set()
        if self._watch is not None:
            self._watch.close()
        if self._link is not None:
            self._link.stop()
        self._publisher.close()
        if self._engine is not None:
            self._engine.close()
        if self._server is not None:
            self._server.close()
        if self._master is not None:
            self._master.close()
        self._copies.close()
        self._mover.close()
        if self._prefaulter is not None:
            self._prefaulter.join(self._settings.shutdown_timeout_s)
        for tier in self._tiers.values():
            tier.close()
        if self._name is not None:
            self._name.close()
        self.reactor.close()

    def _encoding(self, block: Block) -> Encoding | None:
        """What a block of DRAM will be in NVMe, if it is encoded on its way."""
        slot = block.slots[DRAM]
        assert slot is not None
        assert self._codec is not None
        return self._codec.encoding(self._dram.view(slot))

    def _visible(self) -> list[Block]:
        return list(self._table.blocks())

    def _tick(self) -> None:
        now_ns = self.reactor.now_ns()
        work: list[Callable[[], object]] = [
            lambda: self._leases.expire(now_ns=now_ns),
            lambda: self._table.expire(now_ns=now_ns),
            lambda: self._answers.expire(now_ns=now_ns),
            lambda: self._waiting.expire(now_ns=now_ns),
            lambda: self._reads.expire(now_ns=now_ns),
            self._waiting.retry,  # whatever made room: an answer that has been sent lets go of its blocks without a word
            self._copies.step,
        ]
        if self._regions is not None:
            work.append(self._regions.sweep)
        for part in work:  # each is done whatever another raises
            self.reactor.guarded(part)

    def _on_link_lost(self, registration_epoch: int) -> None:
        if self._link is not None:
            self._link.lost(registration_epoch)

    def status(self) -> tuple[list[pb.TierStatus], dict[str, int]]:
        return self._status.now()
