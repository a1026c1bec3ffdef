"""What must be so of a cluster that has been left alone for a while: its parts agree, and nothing is left of what is over."""

from collections.abc import Iterator

from kvstore.master.directory.membership import ALIVE
from kvstore.master.master import Master
from tests.simulation.cluster import Cluster
from tests.simulation.etcd import ModelCatalog


def owned_by(master: Master) -> str:
    """Whom it takes for the owner."""
    return master.told(master.partitions[0]).owner


def is_settled(cluster: Cluster) -> bool:
    """One master owns the catalog and the others follow it; every node has told it its inventory, and nothing is undecided."""
    owner = cluster.owner()
    if owner is None:
        return False
    for master in cluster.masters:
        if master.process is None or master.process.is_stopped or master.master is None or owned_by(master.master) != owned_by(owner):
            return False
    if not has_all_nodes(cluster, owing=True):
        return False
    for daemon in cluster.nodes:
        node = daemon.node
        assert node is not None
        if not node._publishers.is_synced or node._publishers.backlog or any(True for _ in node._table.undecided.blocks()):
            return False
    return True


def copies_nothing(cluster: Cluster) -> bool:
    """No copy is on its way, the owner has heard of all that left for one, and the catalog has it: the directory is told of a copy at once,
    the catalog in its own time."""
    owner = cluster.owner()
    if owner is None or len(owner.partitions[0].standing.leading().directory.replication) or not is_settled(cluster):
        return False
    [catalog] = owner._catalogs
    assert isinstance(catalog, ModelCatalog)
    return catalog.has_written_all and not any(len(daemon.node._copies) for daemon in cluster.nodes if daemon.node is not None)


def has_all_nodes(cluster: Cluster, *, owing: bool = False) -> bool:
    """Every node has a link to the master that owns the catalog, which has its inventory; `owing`: also one that has not said to have
    dropped what was removed, for its disk failed then: it is asked again when it next registers."""
    owner = cluster.owner()
    if owner is None:
        return False
    members = owner.partitions[0].standing.leading().directory.members
    names = {node.info.name for node in members.live() if node.is_settled or (owing and node.state == ALIVE)}
    return all(daemon.process is not None and daemon.node is not None and daemon.name in names for daemon in cluster.nodes)


def disagreements(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each. For a settled cluster without operations for as long as reservations and open puts last."""
    owner = cluster.owner()
    if owner is None:
        yield "not healed", "nobody owns the catalog"
        return
    directory = owner.partitions[0].standing.leading().directory
    try:
        directory.check_integrity()
        for daemon in cluster.nodes:
            assert daemon.node is not None
            with cluster.world.within(daemon.process):  # policies look at its clock
                daemon.node._table.check_integrity()
    except AssertionError as error:
        yield "integrity", str(error)
    yield from _places(cluster)
    yield from _leftovers(cluster)


def _places(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """The directory names the nodes that have a block, in the generation that they have, and etcd the same."""
    owner = cluster.owner()
    assert owner is not None
    directory = owner.partitions[0].standing.leading().directory
    ids = {node.info.name: node.node_id for node in directory.members}
    tables = {ids[daemon.name]: cluster.blocks_at(daemon) for daemon in cluster.nodes if daemon.name in ids}
    places = sorted({place for table in tables.values() for place in table} | cluster.etcd.blocks.keys())
    for tenant, key in places:
        found = directory.queries.lookup(tenant, [key])
        told = dict.fromkeys(found.nodes, (found.generations[0], found.checksums[0]))
        blocks = {node_id: table[tenant, key] for node_id, table in tables.items() if (tenant, key) in table}
        there = {node_id: (block.generation, block.checksum) for node_id, block in blocks.items()}
        if told != there:
            kind = "a stale location" if told.keys() - there.keys() else "a block that nobody finds"
            yield kind, f"{tenant}/{key.hex()}: the directory says {told}, nodes have {there}"
        if len(set(there.values())) > 1:
            yield "two versions at once", f"{tenant}/{key.hex()}: {there}"
        record = cluster.etcd.blocks.get((tenant, key))
        recorded = dict.fromkeys(record[5], (record[2], record[1])) if record is not None else {}
        # A node that came back without a block is not taken off its record: its next inventory says so again.
        if not told.items() <= recorded.items() or bool(told) != bool(recorded):
            yield "the catalog is not the directory", f"{tenant}/{key.hex()}: the catalog has {recorded}, the directory {told}"


def _leftovers(cluster: Cluster) -> Iterator[tuple[str, str]]:
    owner = cluster.owner()
    assert owner is not None
    reserved = owner.partitions[0].standing.leading().directory.counts().reserved
    if reserved:
        yield "a leak", f"{reserved} reservations are left"
    for daemon in cluster.nodes:
        node = daemon.node
        assert node is not None
        left = {"leases": len(node._leases), "requests that wait": len(node._waiting), "open puts": node._table.open_puts}
        for what, count in left.items():
            if count:
                yield "a leak", f"{daemon.name}: {count} {what}"
