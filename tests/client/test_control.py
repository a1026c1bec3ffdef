"""Promises of control.py, against a real master."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict, cluster_status, find_control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Unavailable
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import embedded
from tests.client.stub_control import stub_controls
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters


@pytest.fixture(scope="module")
def settings() -> Iterator[ClientSettings]:
    with embedded() as cluster:
        with Client(cluster.address) as client:
            client.put_batch([b"a", b"b"], [b"12", b"345"], namespace="one", ack="cluster")
            client.put(b"c", b"6", ack="cluster")
        yield ClientSettings(master=cluster.address)


def test_keys_are_listed_with_size_and_namespace(settings: ClientSettings) -> None:
    with Control.find(settings) as control:
        assert sorted(control.keys()) == [(b"a", 2, "one"), (b"b", 3, "one"), (b"c", 1, "")]
        assert sorted(stored.key for stored in control.keys("one")) == [b"a", b"b"]
        assert list(control.keys("none of that name")) == []
        assert len(list(control.keys(limit=2))) == 2


def test_change_node_covers_a_partition_in_failover() -> None:
    follower = pb.StatusReply(role="following")
    with stub_controls(pb.StatusReply(role="owner"), follower) as (first, second):
        settings = ClientSettings(deadline_s=60.0)
        with Control(first.place, settings, second.place, are_owners=True) as control:
            for ask in (control.status, lambda: control.drain("n0")):
                with pytest.raises(Unavailable, match="this master does not own partition 1 any more: retry"):
                    ask()
            assert not first.drained
            follower.role = "owner"
            control.drain("n0")
            assert (first.drained, second.drained) == (["n0"], []), "the second does not know it"
        with Control(second.place, settings) as control:
            follower.role = "following"
            assert control.status().role == "following", "of a master that is asked for itself"


def test_the_status_of_a_cluster_waits_for_the_next_owner() -> None:
    of_first = pb.StatusReply(role="following")
    with stub_controls(of_first, pb.StatusReply(role="owner", blocks=3)) as (before, now), stub_masters(1) as (master,):
        master.control = before.place
        settings = ClientSettings(master=master.address, deadline_s=60.0, owner_retry_s=0.01)
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(cluster_status, settings)
            eventually(lambda: master.hellos > 2, "it is looked for again")
            master.control = now.place
            assert found.result(60).blocks == 3
        master.control = before.place
        with pytest.raises(Unavailable, match="this master does not own partition 0 any more"):
            cluster_status(dataclasses.replace(settings, deadline_s=0.5, owner_retry_s=0.6))


@pytest.mark.promise("failover")
def test_find_control_follows_and_awaits_the_owner(settings: ClientSettings) -> None:
    with stub_masters(2) as (follower, other):
        follower.owner, other.owner, other.refusal = settings.master, "", Unavailable("no master owns the catalog now")
        of_follower = dataclasses.replace(settings, master=follower.address)
        assert find_control(of_follower) == find_control(settings)
        follower.refusal = other.refusal
        waiting = dataclasses.replace(settings, master=f"{follower.address},{other.address}", deadline_s=60.0)
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(find_control, waiting)
            eventually(lambda: other.hellos > 2, "both have been asked again")
            follower.refusal = None
            assert found.result(60) == find_control(settings)


def test_no_master_is_unavailable_and_names_the_address() -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(Unavailable, match=f"no master can be reached: .*{dead}"):
        Control.find(ClientSettings(master=dead))
    with Control(dead, ClientSettings(deadline_s=5)) as control:
        with pytest.raises(Unavailable):
            control.status()
        with pytest.raises(Unavailable):
            list(control.keys())


def test_a_message_becomes_plain_values_with_whole_numbers() -> None:
    node = pb.NodeStatus(node_id=1, name="n", counters={"b": 1 << 60, "a": 2}, tiers=[pb.TierStatus(name="dram", blocks=1 << 50)])
    plain = as_dict(node)
    assert plain["counters"] == {"a": 2, "b": 1 << 60}
    assert plain["tiers"][0]["blocks"] == 1 << 50
    assert plain["heartbeat_age_s"] == 0.0
    assert as_dict(pb.NextVictim())["hits_per_byte_s"] is None, "an optional number that is absent"
    assert as_dict(pb.NextVictim(hits_per_byte_s=0))["hits_per_byte_s"] == 0
