"""What a node tells its master of itself with each heartbeat: its tiers and counters, and when it is asked which blocks are read most."""

import heapq
from collections.abc import Callable, Iterable

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.message import MAX_LINKS, MAX_TENANT_USES
from kvstore.rpc.tenant_loads import TenantLoads
from kvstore.store.blocks.block import DRAM, HBM, NVME, TIERS
from kvstore.store.blocks.counts import BlockReads
from kvstore.store.blocks.leases import Leases
from kvstore.store.blocks.quotas import NO_USE
from kvstore.store.blocks.table import BlockTable
from kvstore.store.prefault import PageSizes
from kvstore.store.publisher import Publishers
from kvstore.store.puts.in_place import InPlacePuts
from kvstore.store.puts.sent import SentPuts
from kvstore.store.reads.reads import ReadService
from kvstore.store.replicas.queue import ReplicaQueue
from kvstore.store.shown.showing import Showing
from kvstore.store.uses import Uses
from kvstore.store.waiting import WaitingRoom
from kvstore.telemetry.metrics.slow_messages import slow_messages
from kvstore.telemetry.metrics.slow_requests import SlowRequests
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.model import Nic
from kvstore.transfer.topology.traffic import traffic


class NodeStatus:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        table: BlockTable,
        in_place: InPlacePuts,
        sent: SentPuts,
        reads: ReadService,
        leases: Leases,
        waiting: WaitingRoom,
        copies: ReplicaQueue,
        publishers: Publishers,
        engine: TransferEngine | None,
        showing: Showing,
        pages: PageSizes,
        loads: TenantLoads,
        *,
        codec_name: str,
        max_table_bytes: int,
        connections: Callable[[], dict[str, int]],
        is_closed: Callable[[], bool],
    ) -> None:
        """`codec_name` is that of what goes to NVMe ("": none), `max_table_bytes` the table's limit, `connections` is `Server.counts`,
        `is_closed`: the node takes no new blocks."""
        self._table = table
        self._in_place = in_place
        self._sent = sent
        self._reads = reads
        self._leases = leases
        self._waiting = waiting
        self._copies = copies
        self._publishers = publishers
        self._engine = engine
        self._showing = showing
        self._pages = pages
        self._loads = loads
        self._codec_name = codec_name
        self._max_table_bytes = max_table_bytes
        self._connections = connections
        self._is_closed = is_closed

    def uses(self, slowest: SlowRequests, slow_version: int, now_ns: int) -> Uses:
        """What the master hears; slow requests only if they are no longer those of `slow_version`."""
        reads = self._table.reads.told(now_ns)
        told = [pb.NamespaceReads(tenant=one.tenant, namespace=one.namespace, age_s=one.age_s) for one in reads]
        slow = pb.SlowTable(requests=slow_messages(slowest)) if slowest.version != slow_version else None
        return Uses(self.tenants(), told, slow, slowest.version)

    def tenants(self) -> list[pb.TenantUse]:
        """Of the tenants that take most of DRAM: what they take, as the master hears it."""
        use = dict.fromkeys(self._loads.tenants(), NO_USE) | self._table.quotas.use()
        names = heapq.nlargest(MAX_TENANT_USES, use, key=lambda name: use[name].tiers[DRAM])
        return [
            pb.TenantUse(
                tenant=name,
                hbm_bytes=use[name].tiers[HBM],
                dram_bytes=use[name].tiers[DRAM],
                nvme_bytes=use[name].tiers[NVME],
                blocks=use[name].blocks,
                hbm_slabs=use[name].slabs[HBM],
                dram_slabs=use[name].slabs[DRAM],
                connections=self._loads.of(name)[0],
                requests_in_flight=self._loads.of(name)[1],
            )
            for name in names
        ]

    def now(self) -> tuple[list[pb.TierStatus], dict[str, int]]:
        """Tiers and counters as the master hears them."""
        tiers = []
        for index, tier, counts, blocks in self._table.levels():
            encoded = self._table.encoded(index)
            tiers.append(
                pb.TierStatus(
                    name=TIERS[index],
                    capacity_bytes=tier.capacity_bytes,
                    used_bytes=tier.used_bytes,
                    quarantined_bytes=tier.quarantined_bytes,
                    blocks=blocks,
                    hits=counts.hits,
                    evictions=counts.evictions,
                    demotions=counts.demotions,
                    promotions=counts.promotions,
                    prefaulted_bytes=getattr(tier, "prefaulted_bytes", tier.capacity_bytes),
                    health=tier.health,
                    codec=self._codec_name if index == NVME else "",
                    logical_bytes=tier.used_bytes + encoded.value_bytes - encoded.stored_bytes,
                    payload_bytes=encoded.payload_bytes,
                    metadata_bytes=encoded.stored_bytes - encoded.payload_bytes,
                    elements=encoded.elements,
                    huge_bytes=self._pages.huge_bytes if index == DRAM else 0,
                    why_not_huge=self._pages.why_not if index == DRAM else "",
                )
            )
        counters = {
            "misses": self._table.misses,
            "corrupt_reads": self._table.corrupt_reads,
            "in_bytes": self._in_place.in_bytes + self._sent.in_bytes,
            "out_bytes": self._reads.out_bytes,
            "table_bytes": self._table.table_bytes,
            "max_table_bytes": self._max_table_bytes,
            "open_puts": self._table.open_puts,
            "slots_ahead": len(self._table.ahead),
            "slots_ahead_bytes": self._table.ahead.bytes,
            "slots_ahead_puts": self._in_place.ahead.puts,
            "slots_ahead_returned": self._table.ahead.taken_back,
            "leases": len(self._leases),
            "holds": len(self._table.holds),
            "held_blocks": self._table.holds.blocks,
            "unheld_blocks": self._table.holds.refused,
            "yielded_blocks": self._table.holds.yielded,
            "waiting": len(self._waiting),
            **self._connections(),
            "engine_bytes": self._engine.served_bytes if self._engine is not None else 0,
            "engine_connections": self._engine.served_connections if self._engine is not None else 0,
            "index_bytes": self._showing.memory_bytes,
            "index_clients": self._showing.clients,
            "undecided": len(self._table.undecided),
            "moving": self._table.room.under_way,
            "spares": len(self._table.lowest.spares),
            "publish_backlog": self._publishers.backlog,
            "closed": int(self._is_closed()),
            "synced": int(self._publishers.is_synced),
            **self._copies.counters(),
        }
        return tiers, counters


def link_flows(nics: Iterable[Nic], engine: TransferEngine | None) -> list[pb.LinkFlow]:
    """What the host's NICs have carried. Reads files: for the link's thread."""
    moved: dict[str, int] = {}
    for (_transport, rail), count in (engine.rails() if engine is not None else {}).items():
        moved[rail] = moved.get(rail, 0) + count.delivered_bytes
    carried = list(traffic(nics).items())[:MAX_LINKS]
    return [
        pb.LinkFlow(device=name, in_bytes=one.in_bytes, out_bytes=one.out_bytes, transfer_bytes=moved.get(name, 0)) for name, one in carried
    ]


def hot_blocks(found: Iterable[BlockReads]) -> list[pb.HotBlocks]:
    """Blocks and how often they are read, by tenant."""
    by_tenant: dict[str, pb.HotBlocks] = {}
    for block, reads_per_s, far_reads_per_s in found:
        one = by_tenant.setdefault(block.tenant, pb.HotBlocks(tenant=block.tenant))
        one.keys.append(block.key)
        one.reads_per_s.append(reads_per_s)
        one.far_reads_per_s.append(far_reads_per_s)
    return list(by_tenant.values())
