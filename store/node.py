"""A storage node put together: tiers, table, services, server and the link to the master, on one reactor.

It owns all of them and the order in which they start and stop. It does not read settings files or print: daemon.py does.
"""

import functools
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.version import VERSION
from kvstore.rpc.access import SocketAccess
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.outbox import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Nobody, Server, default_run_dir
from kvstore.rpc.session import Session
from kvstore.security.binding import check_binding, is_loopback
from kvstore.security.quotas.telling import from_message
from kvstore.security.tls.certificates import Certificates
from kvstore.store.admission import Admission
from kvstore.store.blocks.block import DRAM, NVME, Block
from kvstore.store.blocks.events import EventLog
from kvstore.store.blocks.leases import Leases
from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.blocks.table import BlockTable
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.config import NodeSettings, join_token, max_table_bytes
from kvstore.store.describing import watch_topology
from kvstore.store.engine import make_engine
from kvstore.store.last_copies import LastCopies
from kvstore.store.leaving import Leaving
from kvstore.store.link import Identity, MasterLink, new_instance
from kvstore.store.links import Links
from kvstore.store.mastering import MasterSession
from kvstore.store.measures import NodeMeasures
from kvstore.store.moves.mover import TierMover
from kvstore.store.moves.saving import Saver
from kvstore.store.naming import NodeName
from kvstore.store.opening import check, open_tiers, readable_blocks
from kvstore.store.page_sizes import PageSizes
from kvstore.store.prefault import Prefaulter
from kvstore.store.publisher import Publisher
from kvstore.store.publishers import Publishers
from kvstore.store.puts.answering import Answers
from kvstore.store.puts.checking import Checker
from kvstore.store.puts.claims import Claims
from kvstore.store.puts.deciding import Deciding
from kvstore.store.puts.in_place import InPlacePuts
from kvstore.store.puts.sent import SentPuts
from kvstore.store.puts.slots import Slots
from kvstore.store.reads.reads import ReadService
from kvstore.store.reads.turns import ReadTurns
from kvstore.store.regions import SharedRegions
from kvstore.store.replicas.queue import ReplicaQueue
from kvstore.store.service import NodeService
from kvstore.store.shown.showing import Showing
from kvstore.store.status import NodeStatus, hot_blocks, link_flows
from kvstore.store.waiting import WaitingRoom
from kvstore.telemetry.http.opening import open_http
from kvstore.telemetry.metrics.catalog import NODE
from kvstore.telemetry.metrics.metric import Readings
from kvstore.telemetry.metrics.requests import TURN_S
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.opening import open_tracing, spans_told
from kvstore.tiers.dram import DramTier
from kvstore.tiers.policies.by_name import make_policy
from kvstore.tiers.value_codec import Encoding, make_codec
from kvstore.transfer.config import TransferSettings

TICK_S = 0.1
"""How often leases, open puts and waiting requests are looked at for their deadlines."""
BEAT_S = 0.02
"""How often the indexes say that the node lives, and what clients read by themselves is counted."""
FLUSH_INTERVAL_S = 1.0
"""How often queued deletions are written down in a tier that nothing else is written to."""
SAVED_BATCHES = 4
"""Batches of `move_batch` that are planned at once when memory is written down: the mover always has one, and no more than these are
written yet when the time is over."""
PEERS_INTERVAL_S = 1.0
"""How often nodes that this one has copied nothing from for long are looked for: see `peer_ttl_s`."""
TICKETS_INTERVAL_S = 1.0
"""How often sessions are looked at whose ticket may have ended."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a started node can be reached."""

    name: str
    tcp: str
    unix: str
    http: str
    """Of health, metrics and diagnostics; "" for none."""


def hang_up_on_looker(owner: object) -> None:
    """Its client has looked at something for longer than a lease may last, and it was in the way."""
    assert isinstance(owner, Session)
    owner.close("the client looked at a value for longer than max_lease_s")


class Node:
    """See the module. All methods belong to the thread that calls `reactor.run`."""

    def __init__(
        self,
        settings: NodeSettings,
        transfer: TransferSettings | None = None,
        tracing: TracingSettings | None = None,
        *,
        on_synced: Callable[[], None] = lambda: None,
        on_prefaulted: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the tiers, recover what NVMe holds, and listen; whoever connects is served from `start` on.

        `on_synced` is called in the loop each time the master knows the whole inventory, `on_prefaulted` once `prefault` is done.
        Raises ConfigError: the settings cannot be met, or an address cannot be had; nothing is left open then.
        """
        check(settings)
        self._settings = settings
        self._measures = NodeMeasures()
        self._transfer = transfer or TransferSettings()
        self._trace_settings = tracing
        join_token(settings)  # refused now if not when it looks for a master
        self._tls = Certificates.of_peer(settings, "a node")
        self._addresses = [parse_address(text.strip()) for text in settings.master.split(",")]
        self._on_synced = on_synced
        self._partitioning = Partitioning()
        self._instance = new_instance()
        self._codec = make_codec(settings.nvme_codec)
        with ExitStack() as opened:
            self._open(opened)
            self._assemble(on_prefaulted)
            self._listen(opened)
            self._serve()
            self._find_masters()
            opened.pop_all()

    def _open(self, opened: ExitStack) -> None:
        """Reactor, tiers, engine, and the table with what NVMe held."""
        settings = self._settings
        self.reactor = Reactor(busy_poll=BusyPoll(settings.busy_poll_us))
        opened.callback(self.reactor.close)
        self._tiers = open_tiers(settings)
        for tier in self._tiers.values():
            opened.callback(tier.close)
        self._engine = make_engine(self._transfer, self._instance, listens_on=parse_address(settings.listen).host, tls=self._tls)
        if self._engine is not None:
            opened.callback(self._engine.close)
        dram = self._tiers[DRAM]
        assert isinstance(dram, DramTier)
        self._dram = dram
        interval_s = settings.claim_interval_s
        self._publishers = Publishers(
            self._inventory,
            self._partitioning,
            lambda blocks: Publisher(
                blocks,
                batch_events=settings.publish_batch,
                max_in_flight=settings.publish_in_flight,
                later=(lambda callback: self.reactor.call_later(interval_s, callback)) if interval_s else None,
            ),
        )
        self._showing = Showing(dram, max_look_ns=int(settings.max_lease_s * 1e9), hang_up=hang_up_on_looker)
        opened.callback(self._showing.close)
        self._table = BlockTable(
            self._tiers,
            make_policy=lambda: make_policy(settings.policy),
            emit=self._publishers.emit,
            events=EventLog(lambda: time.time_ns() // 1000),
            put_ttl_ns=int(settings.put_ttl_s * 1e9),
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
            encoding_of=self._encoding if self._codec is not None else None,
            max_table_bytes=max_table_bytes(settings),
            showing=self._showing,
            partitioning=self._partitioning,
        )
        if NVME in self._tiers:
            found = self._table.recover(readable_blocks(self._tiers[NVME], self._table.rows))
            log.info("recovered %d blocks from NVMe", found)

    def _assemble(self, on_prefaulted: Callable[[], None]) -> None:
        """What works on the table: copies between tiers, puts, reads, replicas."""
        settings, dram = self._settings, self._dram
        self._waiting = WaitingRoom(max_of_owner=settings.peer_requests)
        self._leases = Leases(self._table.copies.release)
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
        self._claims = Claims(self._table, self._answers, self._publishers, self._partitioning)
        self._deciding = Deciding(
            self.reactor,
            self._table,
            self._publishers,
            self._answers,
            interval_s=settings.claim_interval_s,
            on_room=self._waiting.retry,
        )
        self._regions = SharedRegions(dram, self._engine) if self._engine is not None else None
        slots = Slots(self._table, self._waiting)
        self._checker = Checker(self.reactor)
        self._in_place = InPlacePuts(self._table, dram, self._publishers, slots, self._answers, self._checker, self._regions)
        self._sent = SentPuts(self._table, dram, self._publishers, slots, self._answers, self._claims, self._checker)
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
            engine=self._engine,
            tls=self._tls,
        )
        self._last_copies = LastCopies(self._table.lowest, self._partitioning, clock_ns=self.reactor.now_ns)
        saver = Saver(self._table, batch_bytes=SAVED_BATCHES * settings.move_batch, may_be_decided=lambda: bool(self._service.links))
        self._leaving = Leaving(saver, has_nvme=NVME in self._tiers, clock_ns=self.reactor.now_ns)
        self._pages = PageSizes(dram, asks=settings.transparent_hugepages)
        self._prefaulter = Prefaulter(self.reactor, dram, self._pages, step_bytes=settings.prefault_step, on_done=on_prefaulted)

    def _asks_for_certificates(self) -> bool:
        return self._tls is not None and self._tls.requires_client_cert

    def _listen(self, opened: ExitStack) -> None:
        """Take the addresses, and with them the name."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        check_binding(
            "listen",
            listen.host,
            is_authenticated=bool(join_token(settings)) or self._asks_for_certificates(),
            allow_unauthenticated=settings.allow_unauthenticated,
            mend="give tokens to the masters, and this node a join_token",
        )
        self._server = Server(
            self.reactor,
            Nobody(),
            max_connections=settings.max_connections,
            limits=SendLimits(settings.peer_bytes, settings.send_timeout_s),
            hello_timeout_s=settings.hello_timeout_s,
            max_strangers=settings.max_strangers,
            peer_timeout_s=settings.peer_timeout_s,
            tls=self._tls,
            observer=self._measures.requests if settings.http else None,  # else nobody can read it
        )
        opened.callback(self._server.close)
        tcp = self._server.listen_tcp(listen.host, listen.port)
        run_dir = Path(settings.run_dir) if settings.run_dir else default_run_dir()
        access = SocketAccess.chosen(settings.socket_group, settings.socket_mode)
        unix = self._server.listen_unix(run_dir / f"node-{tcp.rpartition(':')[2]}.sock", access)
        self._name = NodeName(settings, socket.gethostname(), tcp, run_dir)
        opened.callback(self._name.close)
        self._tracing = self._server.tracer = open_tracing(self._trace_settings, role="node", instance=self._name.text)
        if self._tracing is not None:
            opened.callback(self._tracing.close)
        self.http = open_http(settings)
        """Health and what is added before `start`; None where the settings want none."""
        if self.http is not None:
            opened.callback(self.http.close)
        told = settings.advertise or tcp
        http = self.http.told(parse_address(told).host) if self.http is not None else ""
        traces = self._tracing is not None
        self._identity = Identity(self._name.text, VERSION, socket_id(unix), unix, told, self._instance, http, traces)

    def _serve(self) -> None:
        """Who connects has the service from now on."""
        self._admission = Admission(clock_ns=self.reactor.now_ns, grace_s=self._settings.ticket_grace_s)
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
            self._showing,
            self._deciding,
            self._leaving,
            self._admission,
            self._partitioning,
            identity=self._identity,
        )
        self._server.handler = self._service
        self._status = NodeStatus(
            self._table,
            self._in_place,
            self._sent,
            self._reads,
            self._leases,
            self._waiting,
            self._copies,
            self._publishers,
            self._engine,
            self._showing,
            self._pages,
            self._service.loads,
            codec_name=self._codec.name if self._codec is not None else "",
            max_table_bytes=max_table_bytes(self._settings),
            connections=lambda: len(self._server.sessions),
            is_closed=lambda: self._leaving.is_closed,
        )

    def _find_masters(self) -> None:
        """The ways to the masters, and what they are told: the last to be made, for nothing that they open is closed by another's failure.
        Partition 0's tells which others there are."""
        self._links = Links(self._partitioning, make_session=self._session, make_link=self._link, on_cut=self._cut)
        self._watch = watch_topology(self._transfer, self._engine, self._links.describe)

    def _cut(self) -> None:
        """There are several partitions: each has events and claims of its own."""
        self._publishers.cut()
        self._table.undecided.regroup()

    def _synced(self) -> None:
        if self._publishers.is_synced:
            self._on_synced()

    def _session(self, partition: int) -> MasterSession:
        return MasterSession(
            self.reactor,
            self._service,
            self._publishers[partition],
            self._claims,
            self._deciding,
            self._copies,
            self._last_copies,
            self._admission,
            self._engine,
            partition,
            peer_timeout_s=self._settings.peer_timeout_s,
            on_synced=self._synced,
            on_lost=lambda registration_epoch: self._links.lost(partition, registration_epoch),
            tracer=self._tracing,
        )

    def _link(self, partition: int, session: MasterSession) -> MasterLink:
        settings = self._settings
        listens_on = parse_address(settings.listen).host
        return MasterLink(
            self.reactor,
            self._addresses,
            self._identity,
            tier_status=self.status,
            rates=lambda: self._copies.rates.told(self.reactor.now_ns()),
            hot=lambda most: hot_blocks(self._table.events.hottest(most, self.reactor.now_ns())),
            links=lambda: link_flows(self._watch.topology.nics if self._watch is not None else (), self._engine),
            tenants=self._status.tenants,
            on_quotas=self._set_quotas,
            on_registered=(lambda count, node_id: self._links.registered(count, node_id))
            if not partition
            else lambda _count, _node_id: None,
            on_link=session.begin,
            over_link=session.beat,
            join_token=lambda: join_token(settings),
            needs_tickets=not (settings.allow_unauthenticated or self._asks_for_certificates() or is_loopback(listens_on)),
            timeout_s=settings.control_timeout_s,
            patience_s=settings.owner_patience_s,
            peer_timeout_s=settings.peer_timeout_s,
            pause_s=settings.reconnect_interval_s,
            max_pause_s=settings.reconnect_max_interval_s,
            tls=self._tls,
            partition=partition,
            node_id=lambda: self._links.node_id if partition else 0,
        )

    def start(self) -> Places:
        """Look for the master, and set the clockwork going."""
        self.reactor.after_events += [
            self._leaving.step,
            self._mover.kick,
            self._publishers.flush,
            self._deciding.flush,
            self._last_copies.step,
        ]
        self.reactor.every(TICK_S, self._tick)
        self.reactor.every(TURN_S, self._measures.requests.turn)
        self.reactor.every(BEAT_S, self._beat)
        self.reactor.every(FLUSH_INTERVAL_S, self._mover.flush)
        self.reactor.every(FLUSH_INTERVAL_S, self._reads.tidy)
        self.reactor.every(PEERS_INTERVAL_S, self._forget_peers)
        self.reactor.every(TICKETS_INTERVAL_S, self._admission.expire)
        if self._watch is not None:
            self._watch.start()
        self._links.start()
        if self.http is not None:
            ask = functools.partial(self.reactor.call, deadline_s=ALIVE_S)
            add_signals(self.http, NODE, lambda: ask(self.readings), alive=lambda: ask(lambda: None), unready=lambda: ask(self.unready))
            self.http.start()
        identity = self._identity
        return Places(identity.name, identity.tcp, identity.unix, self.http.told() if self.http is not None else "")

    def prefault(self) -> None:
        """Touch all of DRAM once, in a thread: see Prefaulter."""
        self._prefaulter.start()

    def end(self) -> None:
        """Stop the reactor once what only memory holds is written to NVMe, after `drain_s` at the latest."""
        self._leaving.end(self._settings.drain_s, self.reactor.stop)
        self._links.beat()  # a heartbeat, at once: new blocks are to go elsewhere

    def reread_certificates(self) -> None:
        """Look at the files of TLS with the next connection. For any thread, and signal handlers."""
        if self._tls is not None:
            self._tls.reload()

    def close(self) -> None:
        """Hang up, let copies under way end, close the tiers."""
        if self.http is not None:
            self.http.close()
        self._prefaulter.stop()
        if self._watch is not None:
            self._watch.close()
        self._links.stop()
        self._publishers.close()
        if self._engine is not None:
            self._engine.close()
        self._server.close()
        self._showing.close()
        self._links.close()
        self._copies.close()
        self._checker.close()
        self._mover.close()
        self._prefaulter.join(self._settings.shutdown_timeout_s)
        for tier in self._tiers.values():
            tier.close()
        self._name.close()
        if self._tracing is not None:
            self._tracing.close()
        self.reactor.close()

    def _encoding(self, block: Block) -> Encoding | None:
        """What a block of DRAM will be in NVMe, if it is encoded on its way."""
        slot = block.dram
        assert slot is not None
        assert self._codec is not None
        return self._codec.encoding(self._dram.view(slot))

    def _inventory(self) -> list[Block]:
        """What the master has decided about: the rest is claimed."""
        return [block for block in self._table.blocks() if block.generation != UNDECIDED]

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
            self._showing.sweep,
            self._leaving.tick,
            self._last_copies.tick,
            lambda: self._measures.tick(self._table, now_ns),
        ]
        if self._regions is not None:
            work.append(self._regions.sweep)
        for part in work:  # each is done whatever another raises
            self.reactor.guarded(part)

    def _beat(self) -> None:
        """Clients of this host see that the node lives, and it sees what they read; at once again while there is more of that."""
        is_more = self._showing.beat(self.reactor.now_ns())
        is_more |= self._showing.take_accesses(self._table.read_unasked)
        if is_more:
            self.reactor.call_soon(self._beat)

    def _set_quotas(self, told: pb.Quotas) -> None:
        """What the master says that tenants may take; who waits for room may have it now."""
        quotas = from_message(told)
        self._table.quotas.set(quotas)
        self._service.loads.hold_to(quotas)
        self._waiting.retry()

    def _forget_peers(self) -> None:
        if self._engine is not None and self._engine.peers():
            self._mover.do_aside(self._engine.forget_idle)

    def unready(self) -> list[str]:
        """Why it does not serve clients and its master, a line a reason."""
        reasons = [] if self._publishers.is_synced else ["no master knows this node's blocks: it is not registered, or not yet"]
        return reasons + (["the node is to be stopped, and takes no new blocks"] if self._leaving.is_closed else [])

    def readings(self) -> Readings:
        """What its metrics tell now."""
        self._measures.tick(self._table, self.reactor.now_ns())
        return self._measures.read(
            self._name.text,
            self._table,
            self.status,
            self._engine,
            is_ready=not self.unready(),
            trace_spans=spans_told(self._tracing),
            refused=self._service.loads.refused(),
        )

    def status(self) -> tuple[list[pb.TierStatus], dict[str, int]]:
        tiers, counters = self._status.now()
        return tiers, counters | self._measures.requests.told()
