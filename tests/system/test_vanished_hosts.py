"""A host that vanishes (its rail is cut and carries nothing).

Resources that were held for it are freed, and its peers continue with other hosts.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.rpc.keepalive import MIN_PEER_TIMEOUT_S
from tests.namespaces import TwoHosts, two_hosts
from tests.store.daemons import Daemon, running
from tests.system.far_client import FarClient
from tests.system.hosts import MASTER, NODE, master_flags, node_flags
from tests.system.running import MIB, PROCESS_POLL_S, until
from tests.system.test_engine_links import await_links

UNNOTICED_S = 3600.0
"""A peer timeout that no test lives to see."""
HOLDER = """
import sys, time
from kvstore.protocol.node_messages import OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
channels = []
for number in range(10):
    channel = Channel.open(parse_address(sys.argv[1]), Hello(ROLE_CLIENT), Deadline(20))
    message = OpenSlots("", [b"%d" % number], [4 << 20], [number + 1], [b""], 1)
    assert channel.call(message, OpenSlotsReply, Deadline(20)).put_ids[0]
    channels.append(channel)
print("held", flush=True)
time.sleep(3600)
"""
"""Ten connections, each with an open put of 4 MiB."""


@contextmanager
def daemons(
    hosts: TwoHosts,
    folder: Path,
    *,
    node_on: int,
    masters: Sequence[str],
    more: Sequence[str] = (),
    peer_timeout_s: float = MIN_PEER_TIMEOUT_S,
) -> Iterator[Daemon]:
    """A master on host 0, reached by every rail, and a node that knows it by these addresses and does not see its Unix socket."""
    quick = ["--peer-timeout-s", str(peer_timeout_s)]
    flags = [*master_flags("0.0.0.0", folder / "m", control="0.0.0.0"), *quick]
    node = node_flags(",".join(masters), "0.0.0.0", "n0", folder / "n")
    node += ["--advertise", f"{hosts.rails[0].addresses[node_on]}:{NODE}", "--dram", "64MiB", "--control-timeout-s", "1", *quick, *more]
    (folder / "m").mkdir()
    with (
        running("master", *flags, "--node-ttl-s", "3600", log=folder / "master.log", host=hosts.names[0]) as master,
        running("node", *node, log=folder / "node.log", host=hosts.names[node_on], hidden=[str(folder / "m")]) as daemon,
    ):
        assert daemon.line()["event"] == "ready"
        yield master


class Teller:
    """A process on host 0 that says, as often as it is asked, what the master tells there of the node. It ends with the hosts."""

    def __init__(self, hosts: TwoHosts, master: str) -> None:
        script = "import sys; from tests.system.test_vanished_hosts import tell; tell(sys.argv[1])"
        self._process = hosts.start(0, [sys.executable, "-c", script, master], stdin=PIPE, stdout=PIPE, text=True)

    def node(self) -> pb.NodeStatus:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return pb.StatusReply.FromString(bytes.fromhex(self._process.stdout.readline())).nodes[0]


def tell(master: str) -> None:
    for _ in sys.stdin:
        with Control.find(ClientSettings(master=master)) as control:
            print(control.status().SerializeToString().hex(), flush=True)


@pytest.mark.promise("peers-vanish")
def test_vanished_client_frees_slots_and_connections(tmp_path: Path) -> None:
    with two_hosts(0) as hosts:
        await_links(hosts, "rail0")
        address = hosts.rails[0].addresses[0]
        master = f"{address}:{MASTER}"
        with daemons(hosts, tmp_path, node_on=0, masters=[master], more=["--put-ttl-s", "0.1"]):
            teller = Teller(hosts, master)
            before = teller.node().counters["connections"]
            holder = hosts.start(1, [sys.executable, "-c", HOLDER, f"{address}:{NODE}"], stdout=-1, text=True)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            until(lambda: teller.node().counters["connections"] == before + 10, "ten connections")
            hosts.cut(0)

            def is_free() -> bool:
                found = teller.node()
                return found.counters["connections"] == before and not found.tiers[0].used_bytes + found.tiers[0].quarantined_bytes

            until(is_free, "all of it is free")


@pytest.mark.promise("failover")
@pytest.mark.promise("peers-vanish")
@pytest.mark.parametrize("peer_timeout_s", [MIN_PEER_TIMEOUT_S, UNNOTICED_S], ids=["it is noticed", "it looks open"])
def test_node_with_vanished_route_registers_by_another(tmp_path: Path, peer_timeout_s: float) -> None:
    """Also while the old connection looks open: heartbeats are not answered."""
    with two_hosts(0, 0) as hosts:
        await_links(hosts, "rail0", "rail1")
        masters = [f"{rail.addresses[0]}:{MASTER}" for rail in hosts.rails]
        with daemons(hosts, tmp_path, node_on=1, masters=masters, peer_timeout_s=peer_timeout_s):
            teller = Teller(hosts, masters[0])
            first = teller.node()
            hosts.cut(0)
            until(lambda: teller.node().registration_epoch > first.registration_epoch, "it has registered anew")


@pytest.mark.promise("peers-vanish")
def test_client_does_not_wait_on_vanished_idle_connection(tmp_path: Path) -> None:
    with two_hosts(0, 0) as hosts:
        await_links(hosts, "rail0", "rail1")
        masters = [f"{rail.addresses[0]}:{MASTER}" for rail in hosts.rails]
        with daemons(hosts, tmp_path, node_on=1, masters=masters), FarClient(hosts, 1, ",".join(masters), peer_timeout_s=1) as client:
            assert client.put(["k"], MIB)["done"] == [True]
            hosts.cut(0)

            def is_given_up() -> bool:
                return masters[0] not in hosts.run(1, ["ss", "-tnH", "state", "established"])

            until(is_given_up, "the kernel has given the connections up", every_s=PROCESS_POLL_S)
            assert client.get(["k", "other"], MIB)["done"] == [True, None], "by the other address of the master, within the call's deadline"
