"""Tests of status.py: a master's current state, and the reasons that it is not ready."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.status import PartitionRole, role_in
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.version import VERSION
from kvstore.security.grpc_metadata import as_metadata
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import OPERATOR, tokens_file
from tests.etcd_server import EtcdServer
from tests.master.blocks import Event
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread


def asked(places: Places) -> pb.StatusReply:
    with places.stub() as stub:
        reply: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
        return reply


def told(places: Places) -> tuple[list[PartitionRole], list[str], float, float]:
    """Its roles, why it is not ready, and what its metrics say of that and of its epoch."""
    master = places.master
    assert master is not None

    def look() -> Any:
        readings = master._status.readings()
        roles = [role_in(partition) for partition in master.partitions]
        return roles, master._status.unready(), readings["kvstore_master_ready"], readings["kvstore_master_epoch"]

    found: tuple[list[PartitionRole], list[str], float, float] = master.reactor.call(look, deadline_s=TIMEOUT_S)
    return found


def test_an_owner_tells_of_itself_and_of_what_it_knows(tmp_path: Path) -> None:
    with master_in_thread(tmp_path, catalog=f"lmdb:{tmp_path / 'catalog'}") as places:
        node = NodeSide(places)
        node.sync(Event(b"a"), Event(b"b"))
        reply = asked(places)
        assert (reply.version, reply.role, reply.partitions, reply.records, reply.blocks) == (VERSION, "owner", 1, 2, 2)
        assert (reply.owner.address, [owner.address for owner in reply.owners]) == (places.listen, [places.listen])
        assert reply.rss_bytes > 1 << 20
        assert 0 < reply.uptime_s < asked(places).uptime_s
        assert told(places) == ([PartitionRole(MasterRole.OWNER, places.listen, places.epoch)], [], 1, places.epoch)
        node.close()


def test_each_reason_not_to_be_ready_is_told_with_its_partition(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> None:
    server = etcd_server_factory()
    settings: dict[str, Any] = {"catalog": f"etcd://{server.host_port}", "partitions": 2, "node_ttl_s": 60.0, "lease_ttl_s": 5.0}
    with master_in_thread(tmp_path, **settings) as places:
        assert told(places)[1:3] == ([], 1)
        nodes = [NodeSide(places)]
        server.freeze()
        eventually(lambda: [role.role for role in told(places)[0]] == [MasterRole.CUT_OFF] * 2, "both leases are over")
        eventually(lambda: any(line.startswith("catalog: ") for line in told(places)[1]), "etcd's silence has been noticed")
        _roles, why, is_ready, _epoch = told(places)
        assert why[0] == "this master is cut off from partition 0 of its catalog, which another one may own"
        assert "this master is cut off from partition 1 of its catalog, which another one may own" in why
        assert len(why) == len(set(why))
        assert not is_ready
        for node in nodes:
            node.close()
        server.thaw()


def test_status_lists_credentials_that_expire_soon(tmp_path: Path) -> None:
    """To operators; and all that end, in metrics."""
    at = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
    days = {"soon": "2100-01-08", "late": "2100-03-01"}
    more = "".join(f'[[tenants.{name}]]\ntoken = "{name} ends"\nexpires = {day}\n' for name, day in days.items())
    tokens = tokens_file(tmp_path, more=more)
    with master_in_thread(tmp_path / "run", tokens=tokens, wall_s=lambda: at) as places, places.stub() as stub:
        status = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("", OPERATOR))
        assert [(one.what, one.left_s) for one in status.expirations] == [("token of tenant soon", 7 * 86_400)]
        assert not stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("red", "secret")).expirations
        assert places.master is not None
        read = places.master.reactor.call(places.master._status.readings, deadline_s=TIMEOUT_S)
    assert read["kvstore_master_token_valid_seconds"] == {("tenant", "soon"): 7 * 86_400, ("tenant", "late"): 59 * 86_400}
