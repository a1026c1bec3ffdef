"""A key space in several partitions: clients do not notice them, and masters divide them among themselves.

If one master fails, only its partitions wait until others own them. No acknowledged block is lost.
"""

import os
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError, QuotaExceeded
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.partitions import partition_of
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.master.running import refusal
from tests.system.running import DEADLINE_S, PATIENT_S, SHARES_POLL_S, STATUS_POLL_S, System, running_system, until
from tests.system.test_standby import LEASE, Load

PARTITIONS = 4
FLAGS = ("--partitions", str(PARTITIONS))
KEYS = [b"block-%d" % number for number in range(200)]
VALUES = [b"value %d" % number for number in range(200)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[System]:
    """One master that owns all partitions, and two nodes."""
    with running_system(tmp_path, "--dram 32MiB", nodes=("n0", "n1"), master=" ".join(FLAGS)) as system:
        yield system


@pytest.fixture
def shared(tmp_path: Path, etcd_url: str) -> Iterator[System]:
    """Three masters that have shared the partitions out, and two nodes."""
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=3) as system:
        system.start_masters(*FLAGS, *LEASE)
        system.start_nodes("--dram", "32MiB")
        until(lambda: system.is_shared_out(PARTITIONS), "shares that stay", every_s=SHARES_POLL_S)
        yield system


def owners(system: System, *indexes: int) -> dict[int, int]:
    """Return the owner of each partition that one of these masters reports to own."""
    return {partition: index for index in indexes for partition in system.owned(index, PARTITIONS)}


def key_of(partition: int) -> bytes:
    return next(key for key in KEYS if partition_of(key, PARTITIONS) == partition)


@pytest.mark.promise("partitions-hidden")
@pytest.mark.parametrize(("ack", "is_remote"), [("cluster", False), ("node", False), ("node", True)])
def test_a_client_notices_nothing_of_partitions(alone: System, ack: str, is_remote: bool) -> None:
    client = alone.remote_client(ack=ack) if is_remote else alone.client(ack=ack)
    assert {partition_of(key, PARTITIONS) for key in KEYS} == set(range(PARTITIONS))
    with client:
        assert all(client.put_batch(KEYS, VALUES, namespace="n"))
        client.flush()
        assert client.get_batch([*KEYS, b"none"]) == [*VALUES, None]
        assert client.exists_batch([b"none", *KEYS]) == [False] + [True] * len(KEYS)
        assert [client.match_prefix([*KEYS[:at], b"none", *KEYS[at:]]) for at in (0, 1, 77)] == [0, 1, 77]
        assert client.match_prefix(KEYS) == len(KEYS)
        # With ack="node" another host's client asks one node, and that one does not know what others have (docs/promises.md).
        assert not any(client.put_batch(KEYS, VALUES, ack="cluster"))
        assert all(len(found) == 1 for found in client.locate(KEYS))
        assert all(client.pin(KEYS[:50]))
        assert client.remove(KEYS[:100]) == 50
        assert all(client.unpin(KEYS[:50]))
        with Control.find(alone.settings) as control:
            assert {stored.key for stored in control.keys("n")} == {*KEYS[:50], *KEYS[100:]}
            assert len(list(control.keys("n", limit=7))) == 7
            status = control.status()
        assert (status.blocks, status.partitions) == (150, PARTITIONS)
        assert [owner.name for owner in status.owners] == [status.name] * PARTITIONS
        assert sum(node.blocks for node in status.nodes) == 150
        assert client.remove_matching(namespace="n") == 150
        assert not any(client.exists_batch(KEYS))


@pytest.mark.promise("partitions-hidden")
def test_blocks_have_replicas_whichever_partition_they_are_of(alone: System) -> None:
    with alone.client() as client:
        assert all(client.put_batch(KEYS, VALUES, replicas=2, ack="replicas"))
        assert all(len(found) == 2 for found in client.locate(KEYS))


@pytest.mark.promise("partitions-hidden")
def test_a_node_is_drained_of_the_blocks_of_all_partitions(alone: System) -> None:
    with alone.client() as client, Control.find(alone.settings) as control:
        assert all(client.put_batch(KEYS, VALUES))
        [name] = {found[0].node for found in client.locate(KEYS)}
        control.drain(name)
        until(lambda: next(node for node in control.status().nodes if node.name == name).drain.is_done, "drained", every_s=STATUS_POLL_S)
        assert all({place.node for place in found} - {name} for found in client.locate(KEYS))
        control.drain(name, cancel=True)
        assert not any(node.HasField("drain") for node in control.status().nodes)


@pytest.mark.promise("partitions-hidden")
def test_a_partition_that_there_is_not_is_refused(alone: System) -> None:
    with pytest.raises(KVStoreError, match="there is no partition 4"):
        Channel.open(parse_address(alone.address)._replace(partition=4), Hello(ROLE_CLIENT), Deadline(PATIENT_S))


@pytest.mark.promise("partitions-hidden")
def test_the_number_of_partitions_stays_what_it_was(tmp_path: Path, etcd_url: str) -> None:
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}") as system:
        system.start_master(0, *FLAGS)
        flags = ("--listen", "127.0.0.1:0", "--catalog", system.catalog, "--run-dir", str(tmp_path))
        for count in ("1", "2"):
            code, errors = refusal(*flags, "--partitions", count)
            assert (code, "made for a key space of 4 partitions" in errors) == (2, True)


@pytest.mark.promise("failover")
def test_killed_master_stalls_only_its_own_partitions(shared: System) -> None:
    before = owners(shared, 0, 1, 2)
    victim = max(before.values(), key=lambda index: (Counter(before.values())[index], index))
    left = [index for index in range(3) if index != victim]
    with shared.client() as client, shared.remote_client() as other:
        load = Load(client)
        load.goes_on()
        shared.masters[victim].kill()
        for partition, index in before.items():
            if index != victim:  # its owner answers, and does not even know
                place = parse_address(f"127.0.0.1:{shared._master_ports[index][0]}")._replace(partition=partition)
                channel = Channel.open(place, Hello(ROLE_CLIENT), Deadline(PATIENT_S))
                assert channel.welcome.owner == ""
                channel.call(Exists([key_of(partition)]), Flags, Deadline(PATIENT_S))
                channel.close()
        load.goes_on()
        load.end()
        until(lambda: all(other.exists_batch(load.acknowledged)), "all that was acknowledged is found", every_s=STATUS_POLL_S)
        until(lambda: sorted(Counter(owners(shared, *left).values()).values()) == [2, 2], "even shares of two", every_s=SHARES_POLL_S)
        until(lambda: all(other.exists_batch(load.acknowledged)), "all is found by their new owners", every_s=STATUS_POLL_S)
        finds_all(other, load.acknowledged)


@pytest.mark.promise("failover")
def test_an_owner_that_was_stopped_owns_nothing_when_it_is_woken(shared: System) -> None:
    before = owners(shared, 0, 1, 2)
    victim = before[0]
    left = [index for index in range(3) if index != victim]
    with shared.client() as client, shared.remote_client() as other:
        load = Load(client)
        load.goes_on()
        os.kill(shared.masters[victim].pid, signal.SIGSTOP)
        until(lambda: len(owners(shared, *left)) == PARTITIONS, "others own what it had", every_s=SHARES_POLL_S)
        epochs = {
            partition: told.owner.epoch
            for partition, index in owners(shared, *left).items()
            if (told := shared.status_of(index, partition, partitions=PARTITIONS)) is not None
        }
        os.kill(shared.masters[victim].pid, signal.SIGCONT)
        load.goes_on()

        def is_deposed() -> bool:
            found = [shared.status_of(victim, partition, partitions=PARTITIONS) for partition in range(PARTITIONS)]
            return all(
                told is not None and (told.role != "owner" or told.owner.epoch > epochs[partition]) for partition, told in enumerate(found)
            )

        until(is_deposed, "it owns nothing, or has been elected anew", every_s=SHARES_POLL_S)
        load.end()
        until(lambda: all(other.exists_batch(load.acknowledged)), "all that was acknowledged is found", DEADLINE_S, every_s=STATUS_POLL_S)


@pytest.mark.promise("partitions-hidden")
def test_small_limit_can_be_had_in_each_partition(shared: System) -> None:
    """No partition grants more than the whole limit, and each grants a small one whole (docs/security.md)."""
    parts = [[key for key in KEYS if partition_of(key, PARTITIONS) == partition] for partition in (1, 2)]
    with shared.client(tenant="red") as red:
        with Control.find(shared.settings) as control:
            control.set_quota("red", {"pins": 8})
        assert all(red.put_batch(KEYS, VALUES))

        def pins(keys: list[bytes]) -> int:
            """Return how many of the keys can be pinned, one after another."""
            count = 0
            with suppress(QuotaExceeded):
                for key in keys:
                    count += red.pin([key])[0]
            return count

        def is_in_force() -> bool:
            """At the owners of both partitions: others than that of partition 0 follow its catalog."""
            found = [pins(keys) for keys in parts]
            red.unpin([key for keys in parts for key in keys])
            return found == [8, 8]

        until(is_in_force, "each master knows the limit")
        with pytest.raises(QuotaExceeded, match=r"9 more exceed its quota of 8 \(pins\)"):
            red.pin(parts[0][:9])


def finds_all(client: Client, keys: list[bytes]) -> None:
    assert None not in client.get_batch(keys)
