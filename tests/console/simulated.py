"""A cluster that is not there: any number of nodes whose counters grow as they would, for the page, the model and their tests.

A node's figures follow from its number and the time, so that two runs show the same.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence

from kvstore.console.source import ClusterSnapshot, MasterView
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.security.actor import Actor

GIB = 1 << 30
SILENT_S = 340.0
"""Of dead nodes."""
CAPACITIES = {"hbm": 64 * GIB, "dram": 512 * GIB, "nvme": 4096 * GIB}


class Simulated:
    """A Source. `clock` is in seconds; what was asked of it is in `done`."""

    def __init__(self, count: int, clock: Callable[[], float], *, dead: Sequence[int] = (), role: str = "owner") -> None:
        self.count, self.clock = count, clock
        self.dead, self.drained, self.gone = set(dead), dict[str, bool](), set[str]()
        self.role, self.health = role, "ok"
        self.owners: list[str] = []
        """Of partitions, by the masters' names; none: there is one partition."""
        self.failure: KVStoreError | None = None
        self.missing: tuple[str, ...] = ()
        self.expirations: list[pb.Expiration] = []
        self.full: dict[str, float] = {}
        """Shares by tier, of every node; of others they follow from its number."""
        self.done: list[tuple[object, ...]] = []
        self.slow = [
            pb.SlowRequest(tenant="acme", operation="put", duration_us=812_000, time_s=1.7e9, at="node-3", peer="10.0.4.17:401"),
            pb.SlowRequest(tenant="beta", operation="lookup", duration_us=95_400, time_s=1.7e9, at="master-1", peer="10.0.4.9:512"),
        ]
        self.entries: list[pb.AuditEntry] = []
        """The audit trail; numbers count from 1."""

    def snapshot(self) -> ClusterSnapshot:
        if self.failure is not None:
            raise self.failure
        return ClusterSnapshot(self.status(), self.missing)

    def status(self) -> pb.StatusReply:
        at_s = self.clock()
        following = self.role == "following"
        nodes = [] if following else [self._node(index, at_s) for index in range(self.count) if _name(index) not in self.gone]
        return pb.StatusReply(
            version="0.9.0",
            epoch=7,
            uptime_s=at_s,
            catalog="etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379",
            catalog_health=self.health,
            blocks=sum(node.blocks for node in nodes),
            reserved=12 * self.count,
            pinned=340,
            rss_bytes=600 << 20,
            nodes=nodes,
            counters=_requests("lookup", 800 * at_s, 130, 2_400)
            | _requests("match_prefix", 60 * at_s, 310, 6_100)
            | {"requests": int(900 * at_s), "keys": int(40_000 * at_s), "lookup_misses": int(600 * self.count * at_s)}
            | {"home_copies_skipped_gone": 1200},
            name="master-1:7440",
            role=self.role,
            owner=pb.CatalogOwner(name="master-1:7440", address="master-1:7440", epoch=7),
            records=40_000 * self.count,
            shards=64,
            partitions=len(self.owners) or 1,
            expirations=self.expirations,
            owners=[pb.CatalogOwner(name=name) for name in self.owners],
            quotas=pb.Quotas(tenants={"acme": pb.TenantQuota(pins=18), "beta": pb.TenantQuota(dram_bytes=GIB)}),
            grants=[pb.TenantGrants(tenant="acme", pins=17)],
        )

    def masters(self) -> Sequence[MasterView]:
        return [
            MasterView("master-1:7440", "master-1:7440", self.role),
            MasterView("master-2:7440", "master-2:7440", "following", behind=12),
            MasterView("master-3:7440", error="it does not answer within 2 s"),
        ]

    def topologies(self) -> Sequence[pb.NodeTopology]:
        return [
            pb.NodeTopology(
                name=_name(index),
                state="alive",
                topology=b"" if index % 7 == 3 else _topology(index),
                links=[
                    pb.LinkFlow(
                        device=f"mlx5_{place}",
                        in_bytes=int(self.clock() * (place + 1) * 5e9),
                        out_bytes=int(self.clock() * (place + 1) * 9e9),
                        transfer_bytes=int(self.clock() * 1e9),
                    )
                    for place in range(4)
                ],
            )
            for index in range(self.count)
        ]

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        if not self.count:
            return pb.ContentsReply()
        names = [
            ("acme", "3f2a91c0d4b7e8a65c1d09f2b3a4e5f6"),
            ("acme", "91c07be2a4d3f6081b2c3d4e5f60718a"),
            ("beta", "deepseek-v3/fp8/64"),
            ("", "demo"),
        ]
        namespaces = [
            pb.NamespaceUsage(
                tenant=tenant, namespace=name, stored=_stored(40_000 // (place + 1), place), pinned=17 if tenant == "acme" else 0
            )
            for place, (tenant, name) in enumerate(names)
        ]
        namespaces[0].MergeFrom(
            pb.NamespaceUsage(
                model="Llama-3-70B",
                layout="bfloat16, 16 tokens a block, rank 0 of 8",
                weights="fp-0123456789abcdef0123456789abcdef@step-7",
                read_age_s=90,
            )
        )
        namespaces[0].MergeFrom(pb.NamespaceUsage(users=["engine-1", "engine-2", "engine-3"], is_used=True))
        namespaces[1].MergeFrom(pb.NamespaceUsage(model="Qwen3-32B", layout="fp8_e4m3, 32 tokens a block", weights="base", is_retired=True))
        return pb.ContentsReply(namespaces=namespaces, segments=_tree(request.max_segments, is_hot=request.hottest))

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        return self.entries[after:]

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        return self.slow

    def _audited(self, by: Actor, action: str, target: str, old: str = "", new: str = "", detail: str = "") -> None:
        number, time_s = len(self.entries) + 1, 1_700_000_000 + self.clock()
        entry = pb.AuditEntry(number=number, time_s=time_s, kind=by.kind, actor=by.name, peer=by.peer, via=by.via)
        entry.MergeFrom(pb.AuditEntry(action=action, target=target, old=old, new=new, detail=detail, result="done"))
        self.entries.append(entry)

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        self.done.append(("drain", node, to, cancel))
        self._audited(by, "drain", f"node {node}", new="takes blocks" if cancel else f"drained to {to}")
        if cancel:
            self.drained.pop(node, None)
        else:
            self.drained[node] = False

    def forget(self, node: str, by: Actor) -> None:
        if int(node.rpartition("-")[2]) not in self.dead:
            raise InvalidArgument(f"node {node!r} is alive: stop it first")
        self.done.append(("forget", node))
        self._audited(by, "forget", f"node {node}", "dead, 40,000 blocks")
        self.gone.add(node)

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        self.done.append(("pin", tenant, namespace, pinned))
        self._audited(by, "pin", f"namespace {namespace} of tenant {tenant}", detail="1,234 blocks")
        return 1234

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        self.done.append(("remove", tenant, namespace))
        self._audited(by, "remove", f"namespace {namespace} of tenant {tenant}", detail="1,200 blocks")
        return 1200

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        self.done.append(("set_quota", tenant, dict(limits)))
        self._audited(by, "quota_set", f"tenant {tenant}", "pins no limit", "pins 18")

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        self.done.append(("clear_quota", tenant, list(names)))
        self._audited(by, "quota_clear", f"tenant {tenant}", "pins 18", "pins no limit")

    def _node(self, index: int, at_s: float) -> pb.NodeStatus:
        name = _name(index)
        phase = (index * 37 % 100) / 100
        busy = (0.35 + 0.65 * phase) * (1 + 0.35 * math.sin(at_s / 140 + 6 * phase))
        counted = (0.35 + 0.65 * phase) * (at_s - 49 * math.cos(at_s / 140 + 6 * phase))  # the integral of `busy`
        full = min(1.0, 0.35 + 0.6 * ((index * 61) % 97) / 97)
        tiers = []
        for place, (tier, capacity) in enumerate(CAPACITIES.items()):
            if tier == "hbm" and index % 3:
                continue
            used = int(capacity * self.full.get(tier, min(1.0, full * (1.05 - 0.2 * place))))
            tiers.append(
                pb.TierStatus(
                    name=tier,
                    capacity_bytes=capacity,
                    used_bytes=used,
                    blocks=used >> 20,
                    hits=max(0, int(counted * (900, 2600, 500)[place])),
                    evictions=max(0, int(counted * (0, 30, 110)[place])),
                    demotions=max(0, int(counted * (60, 120, 0)[place])),
                    promotions=max(0, int(counted * (40, 80, 0)[place])),
                    evictions_by_reason={
                        "room": max(0, int(counted * (0, 20, 110)[place])),
                        "secondary": max(0, int(counted * (0, 10, 0)[place])),
                    },
                    next_victim=pb.NextVictim(unread_s=90 + 10 * place + index, size_bytes=5 << 20, hits_per_byte_s=(3 - place) * 1e-11),
                    health="I/O error: the disk fails" if index % 211 == 5 and tier == "nvme" else "ok",
                )
            )
        is_dead = index in self.dead
        node = pb.NodeStatus(
            node_id=index + 1,
            name=name,
            host_id=f"host-{index}",
            tcp=f"10.1.{index // 250}.{index % 250 + 1}:7450",
            state="dead" if is_dead else "syncing" if index % 97 == 50 else "alive",
            registration_epoch=1,
            heartbeat_age_s=SILENT_S if is_dead else 0.0,
            blocks=sum(tier.blocks for tier in tiers),
            tiers=tiers,
            counters={
                "misses": max(0, int(counted * 240)),
                "in_bytes": max(0, int(counted * (180 << 20))),
                "out_bytes": max(0, int(counted * (260 << 20))),
                "engine_bytes": max(0, int(counted * (700 << 20))),
                "local_reads": max(0, int(counted * 1500)),
                "remote_reads": max(0, int(counted * 500)),
                "copied_blocks_home": max(0, int(counted * 40)),
                "copied_bytes_home": max(0, int(counted * (200 << 20))),
                "secondary_blocks": max(0, int(counted * 40)),
                "connections": 8 + index % 5 + int(busy),
                **_requests("put", counted * 300, 240, 9_000 + index % 7 * 800),
                **_requests("read", counted * 2000, 85, 4_000 + index % 11 * 300),
            },
            version="0.9.0",
            transports=["tcp eth0", "ucx mlx5_0"],
            rates=[pb.PeerRate(node_id=(index + 1) % self.count + 1, bytes_per_s=(1 + phase) * 1e9, basis_bytes=1 << 30)],
        )
        if name in self.drained:
            node.drain.CopyFrom(pb.DrainStatus(to="peers", is_done=self.drained[name], remaining_blocks=0 if self.drained[name] else 1234))
        return node


def _requests(name: str, count: float, mean_us: int, slowest_us: int) -> dict[str, int]:
    told = max(0, int(count))
    return {f"request_{name}_count": told, f"request_{name}_us": told * mean_us, f"request_{name}_slowest_us": slowest_us}


def _name(index: int) -> str:
    return f"node-{index}"


def _stored(blocks: int, place: int = 1) -> pb.StorageUsage:
    each = 5 << 20
    hbm, dram = (blocks * (4 - place) // 10 * each), (blocks * 4 // 10 * each)
    return pb.StorageUsage(blocks=blocks, bytes=blocks * each, hbm_bytes=hbm, dram_bytes=dram, nvme_bytes=blocks * each - hbm - dram)


def _tree(limit: int, *, is_hot: bool = False) -> list[pb.PrefixSegment]:
    """System prompts, conversations on them, turns of these; the deeper, the colder. Of the hottest the first of each branch."""
    found: list[pb.PrefixSegment] = []

    def grow(parent: int, depth: int, blocks: int, place: int) -> int:
        if len(found) >= limit:
            return 0
        size = blocks * (5 << 20)
        tier = ("hbm", "dram", "nvme")[min(2, (depth + place % 3) // 2)]
        found.append(
            pb.PrefixSegment(
                parent=parent,
                key=bytes([depth, place % 256]) * 8,
                stored=pb.StorageUsage(blocks=blocks, bytes=size, **{f"{tier}_bytes": size}),
                branches=0 if depth > 4 else 3 + place % 4,
            )
        )
        number, total = len(found), size
        if depth < 5:
            for child in range(1 + place % 2 if is_hot else 3 + place % 4 if depth else 6):
                total += grow(number, depth + 1, max(1, blocks * (6 - child) // 9), place * 5 + child)
        found[number - 1].subtree_bytes = total
        if is_hot:
            own = found[number - 1].reads_per_s = blocks * 4.0 / (depth + 1)
            found[number - 1].subtree_reads_per_s = own + sum(one.subtree_reads_per_s for one in found[number:] if one.parent == number)
        return total

    for root in range(5):
        grow(0, 0, 900 // (root + 1), root)
    return found


def _topology(index: int) -> bytes:
    nics = [
        {
            "name": f"mlx5_{place}",
            "kind": "roce",
            "interface": f"eth{place}",
            "addresses": [f"10.{place}.{index // 250}.{index % 250 + 1}"],
            "numa_node": place // 2,
            "speed_gbit_s": 400.0,
            "is_up": not (index % 13 == 4 and place == 1),
            "pci_path": "",
        }
        for place in range(4)
    ]
    nics.append({**nics[0], "name": "eno1", "kind": "ethernet", "interface": "eno1", "speed_gbit_s": 1.0, "is_up": True})
    gpus = [{"index": place, "name": "H100 80GB", "numa_node": place // 2, "pci_path": ""} for place in range(4)]
    matrix: dict[str, list[list[str]]] = {f"cpu:{node}": [[f"mlx5_{2 * node}", f"mlx5_{2 * node + 1}"], []] for node in range(2)}
    matrix |= {f"cuda:{place}": [[f"mlx5_{place}"], []] for place in range(4)}
    numa = [{"number": node, "distances": [10, 20] if node == 0 else [20, 10]} for node in range(2)]
    return json.dumps({"version": 1, "host": f"host-{index}", "numa_nodes": numa, "nics": nics, "gpus": gpus, "matrix": matrix}).encode()
