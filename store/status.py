"""Status of a node for heartbeats and metrics: tiers, counters, hot blocks, usage of tenants."""

import heapq
from collections.abc import Callable, Iterable

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.message import MAX_LINKS, MAX_TENANT_USES
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.store.block_table.access_counts import BlockReads
from kvstore.store.block_table.block import DRAM, HBM, NVME, TIERS
from kvstore.store.block_table.quotas import NO_USE
from kvstore.store.master_session.master_link import HeartbeatReport
from kvstore.store.metrics import NodeMetrics
from kvstore.store.storage import Storage
from kvstore.telemetry.metrics.requests import SlowRequests, slow_messages
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.model import Nic
from kvstore.transfer.topology.traffic import traffic


class NodeStatus:
    """Collects the status. Not thread-safe: called from the node's loop."""

    def __init__(self, storage: Storage, loads: TenantLoads, connections: Callable[[], dict[str, int]], metrics: NodeMetrics) -> None:
        """`loads` are the service's, `connections` is `Server.counts`, `metrics` has the ages of accesses."""
        self._storage = storage
        self._table = storage.table
        self._loads = loads
        self._connections = connections
        self._metrics = metrics

    def report(self, slowest: SlowRequests, slow_version: int, hot_blocks: int, now_ns: int) -> HeartbeatReport:
        """Return a heartbeat report, with slow requests if they are newer than `slow_version`."""
        table = self._table
        tiers, counters = self.now(now_ns)
        return HeartbeatReport(
            tiers,
            counters,
            rates=self._storage.replica_queue.rates.report(now_ns),
            hot=_hot_blocks(table.events.hottest(hot_blocks, now_ns)),
            tenants=self.tenants(),
            reads=[pb.NamespaceReads(tenant=one.tenant, namespace=one.namespace, age_s=one.age_s) for one in table.reads.recent(now_ns)],
            slow=pb.SlowTable(requests=slow_messages(slowest)) if slowest.version != slow_version else None,
            slow_version=slowest.version,
        )

    def reuse(self, *, is_first: bool) -> pb.ReuseReport | None:
        """Return what the eviction policies have learned; None if nothing was stored or read since the last call.
        `is_first`: the master knows nothing yet."""
        found = self._table.shared_reuse.report(self._table.accesses, is_first=is_first)
        tenants = [pb.TenantReuse(tenant=tenant, statistics=statistics) for tenant, statistics in found]
        return pb.ReuseReport(tenants=tenants) if tenants else None

    def tenants(self) -> list[pb.TenantUse]:
        """Return the usage of the tenants that use the most DRAM."""
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

    def now(self, now_ns: int) -> tuple[list[pb.TierStatus], dict[str, int]]:
        """Return tiers and counters."""
        storage, tiers = self._storage, []
        codec_name = storage.codec.name if storage.codec is not None else ""
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
                    evicted_age_s=self._metrics.eviction_ages_s.get(index, 0.0),
                    demotions=counts.demotions,
                    promotions=counts.promotions,
                    prefaulted_bytes=getattr(tier, "prefaulted_bytes", tier.capacity_bytes),
                    health=self._table.health(index),
                    codec=codec_name if index == NVME else "",
                    logical_bytes=tier.used_bytes + encoded.value_bytes - encoded.stored_bytes,
                    payload_bytes=encoded.payload_bytes,
                    metadata_bytes=encoded.stored_bytes - encoded.payload_bytes,
                    elements=encoded.elements,
                    huge_bytes=storage.pages.huge_bytes if index == DRAM else 0,
                    not_huge_reason=storage.pages.why_not if index == DRAM else "",
                    evictions_by_reason=counts.by_reason(),
                    next_victim=self._next_victim(index, now_ns),
                )
            )
        counters = {
            "misses": self._table.misses,
            "corrupt_reads": self._table.corrupt_reads,
            "in_bytes": storage.in_place_puts.in_bytes + storage.socket_puts.in_bytes,
            "out_bytes": storage.reads.out_bytes,
            "table_bytes": self._table.table_bytes,
            "max_table_bytes": storage.memory.table_bytes,
            "open_puts": self._table.open_puts,
            "slots_ahead": len(self._table.ahead),
            "slots_ahead_bytes": self._table.ahead.bytes,
            "slots_ahead_puts": storage.in_place_puts.ahead.puts,
            "slots_ahead_returned": self._table.ahead.taken_back,
            "leases": len(storage.leases),
            "holds": len(self._table.holds),
            "held_blocks": self._table.holds.blocks,
            "unheld_blocks": self._table.holds.refused,
            "yielded_blocks": self._table.holds.yielded,
            "waiting": len(storage.waiting),
            **self._connections(),
            "engine_bytes": storage.engine.served_bytes if storage.engine is not None else 0,
            "engine_connections": storage.engine.served_connections if storage.engine is not None else 0,
            "index_bytes": storage.shared_index.memory_bytes,
            "index_clients": storage.shared_index.clients,
            "undecided": len(self._table.uncommitted),
            "moving": self._table.evictor.under_way,
            "spares": len(self._table.lowest.replicated_victims),
            "secondary_blocks": self._table.secondary_blocks,
            "secondary_bytes": self._table.secondary_bytes,
            "primary_again": self._table.primary_again,
            "local_reads": self._table.events.local_reads,
            "remote_reads": self._table.events.remote_reads,
            "reuse_exchanges": self._table.shared_reuse.exchanges,
            "reuse_of_others": self._table.shared_reuse.observations_of_others,
            "publish_backlog": storage.replicators.backlog,
            "closed": int(storage.drainer.is_closed),
            "synced": int(storage.replicators.is_synced),
            **storage.replica_queue.counters(),
            **storage.prefetcher.counters(),
            "prefetches_expected": storage.expected_prefetches.queued,
            **self._table.retention.counters(),
        }
        return tiers, counters

    def _next_victim(self, index: int, now_ns: int) -> pb.NextVictim | None:
        found = self._table.next_victim(index)
        if found is None:
            return None
        block, worth = found.block, found.worth
        return pb.NextVictim(
            unread_s=self._metrics.age_s(block.last_access, now_ns),
            size_bytes=block.size_bytes,
            reason=found.reason,
            hits_per_byte_s=worth / block.size_bytes if worth is not None else None,
        )


def link_flows(nics: Iterable[Nic], engine: TransferEngine | None) -> list[pb.LinkFlow]:
    """Return the traffic of the host's NICs. Reads files, so it runs in the link's thread."""
    moved: dict[str, int] = {}
    for (_transport, rail), count in (engine.rails() if engine is not None else {}).items():
        moved[rail] = moved.get(rail, 0) + count.delivered_bytes
    carried = list(traffic(nics).items())[:MAX_LINKS]
    return [
        pb.LinkFlow(device=name, in_bytes=one.in_bytes, out_bytes=one.out_bytes, transfer_bytes=moved.get(name, 0)) for name, one in carried
    ]


def _hot_blocks(found: Iterable[BlockReads]) -> list[pb.HotBlocks]:
    """Group blocks and their read rates by tenant."""
    by_tenant: dict[str, pb.HotBlocks] = {}
    for block, reads_per_s, remote_reads_per_s in found:
        one = by_tenant.setdefault(block.tenant, pb.HotBlocks(tenant=block.tenant))
        one.keys.append(block.key)
        one.reads_per_s.append(reads_per_s)
        one.remote_reads_per_s.append(remote_reads_per_s)
    return list(by_tenant.values())
