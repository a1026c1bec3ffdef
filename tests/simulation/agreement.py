"""Invariants of a cluster without load: masters, nodes and catalogs agree, and no finished operation has left a resource."""

from collections.abc import Iterator, Sequence

from kvstore.master.directory.directory import Directory
from kvstore.master.master import Master
from kvstore.master.status import role_in
from kvstore.protocol.node_states import ALIVE
from kvstore.protocol.partitions import partition_of
from tests.simulation.catalog import ModelCatalog
from tests.simulation.cluster import Cluster
from tests.simulation.schedule import TENANTS
from tests.store.integrity import check


def owned_by(master: Master) -> list[str]:
    """Return the owner of each partition, as this master knows it."""
    return [role_in(partition).owner for partition in master.partitions]


def directories(cluster: Cluster) -> list[Directory]:
    """Of each partition, its owner's; fewer where one has no owner."""
    return [partition.role_manager.leader().directory for partition in cluster.owners()]


def is_settled(cluster: Cluster) -> bool:
    """One master owns each partition of the catalog and the others follow it; it has every node's inventory, and no block is
    uncommitted."""
    owners = [owner.address for partition in cluster.owners() if (owner := partition.owner()) is not None]
    if len(owners) < cluster.shape.partitions:
        return False
    for master in cluster.masters:
        if master.process is None or master.process.is_stopped or master.master is None or owned_by(master.master) != owners:
            return False
    if not has_all_nodes(cluster, owing=True):
        return False
    for daemon in cluster.nodes:
        node = daemon.node
        assert node is not None
        if (
            not node._storage.replicators.is_synced
            or node._storage.replicators.backlog
            or any(True for _ in node._storage.table.uncommitted.blocks())
        ):
            return False
    return True


def copies_nothing(cluster: Cluster) -> bool:
    """Return whether no copy is in flight, and the owners and the catalog have all finished copies.

    The directory receives a copy at once, the catalog later."""
    if not is_settled(cluster) or any(len(directory.replication) for directory in directories(cluster)):
        return False
    for partition in cluster.owners():
        assert isinstance(partition.catalog, ModelCatalog)
        if not partition.catalog.has_written_all:
            return False
    return not any(len(daemon.node._storage.replica_queue) for daemon in cluster.nodes if daemon.node is not None)


def has_all_nodes(cluster: Cluster, *, owing: bool = False) -> bool:
    """Every node has a link to the master that owns each partition, which has its inventory; `owing`: also one that has not said to have
    dropped what was removed, for its disk failed then: it is asked again when it next registers."""
    found = directories(cluster)
    for directory in found:
        names = {node.info.name for node in directory.members.live() if node.is_settled or (owing and node.state == ALIVE)}
        if not all(daemon.process is not None and daemon.node is not None and daemon.name in names for daemon in cluster.nodes):
            return False
    return len(found) == cluster.shape.partitions


def disagreements(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each. For a settled cluster without operations for as long as reservations and open puts last."""
    found = directories(cluster)
    if len(found) < cluster.shape.partitions:
        yield "not healed", "nobody owns the catalog"
        return
    try:
        for directory in found:
            directory.check_integrity()
        for daemon in cluster.nodes:
            assert daemon.node is not None
            with cluster.world.within(daemon.process):  # policies look at its clock
                check(daemon.node._storage.table)
    except AssertionError as error:
        yield "integrity", str(error)
    for number, directory in enumerate(found):
        yield from _places(cluster, number, directory)
    yield from _leftovers(cluster, found)


def _places(cluster: Cluster, partition: int, directory: Directory) -> Iterator[tuple[str, str]]:
    """The directory names the nodes that have a block, in the generation that they have, and etcd the same; none but the partition's."""
    ids = {node.info.name: node.node_id for node in directory.members}
    tables = {ids[daemon.name]: cluster.blocks_at(daemon) for daemon in cluster.nodes if daemon.name in ids}
    known = {(tenant, key) for tenant, key in cluster.etcds[partition].blocks} | _shown(directory)
    count = cluster.shape.partitions
    for tenant, key in sorted(place for place in known if partition_of(place[1], count) != partition):
        yield "a block of another partition", f"{tenant}/{key.hex()}: partition {partition} of {count} knows it"
    held = {place for table in tables.values() for place in table if partition_of(place[1], count) == partition}
    for tenant, key in sorted(held | known):
        found = directory.queries.lookup(tenant, [key])
        told = dict.fromkeys(found.nodes, (found.generations[0], found.checksums[0]))
        blocks = {node_id: table[tenant, key] for node_id, table in tables.items() if (tenant, key) in table}
        there = {node_id: (block.generation, block.checksum) for node_id, block in blocks.items()}
        if told != there:
            kind = "a stale location" if told.keys() - there.keys() else "a block that nobody finds"
            yield kind, f"{tenant}/{key.hex()}: the directory says {told}, nodes have {there}"
        if len(blocks) == 1 and any(block.is_secondary for block in blocks.values()):
            yield "a secondary copy without a home", f"{tenant}/{key.hex()}: at {list(blocks)} alone"
        if len(set(there.values())) > 1:
            yield "two versions at once", f"{tenant}/{key.hex()}: {there}"
        record = cluster.record(tenant, key)
        recorded = dict.fromkeys(record[5], (record[2], record[1])) if record is not None else {}
        # A node that came back without a block is not taken off its record: its next inventory says so again.
        if not told.items() <= recorded.items() or bool(told) != bool(recorded):
            yield "the catalog is not the directory", f"{tenant}/{key.hex()}: the catalog has {recorded}, the directory {told}"


def _shown(directory: Directory) -> set[tuple[str, bytes]]:
    """Return the tenant and key of each block that the directory assigns to a node."""
    return {(tenant, key) for tenant in TENANTS for part in directory.queries.list_keys(tenant) for key, _size, _namespace in part}


def _leftovers(cluster: Cluster, found: Sequence[Directory]) -> Iterator[tuple[str, str]]:
    reserved = sum(directory.counts().reserved for directory in found)
    if reserved:
        yield "a leak", f"{reserved} reservations are left"
    for daemon in cluster.nodes:
        node = daemon.node
        assert node is not None
        left = {
            "leases": len(node._storage.leases),
            "requests that wait": len(node._storage.waiting),
            "open puts": node._storage.table.open_puts,
        }
        for what, count in left.items():
            if count:
                yield "a leak", f"{daemon.name}: {count} {what}"
