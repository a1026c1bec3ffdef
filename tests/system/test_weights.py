"""Promises about weight versions, with real processes: an older version's blocks leave first, and a master's end changes nothing."""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from kvstore.client.control import Control
from kvstore.client.instances.weights import WeightsReporter
from kvstore.client.sync import Client
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from tests.system.running import System, running_system, until
from tests.system.test_standby import LEASE

BASE = Namespace(model="m", revision="base", dtype="bf16", block_tokens=16)
V1 = replace(BASE, revision="base@v1")
VALUE_BYTES = 64 << 10
ROOM = 16
"""Values that a node of 1 MiB has room for."""


def keys(namespace: Namespace, count: int) -> list[bytes]:
    return [namespace.id + bytes([number]) for number in range(count)]


def put(client: Client, namespace: Namespace, count: int) -> list[bytes]:
    names = keys(namespace, count)
    assert all(client.put_batch(names, [bytes(VALUE_BYTES)] * count, namespace=namespace))
    return names


def versions(system: System) -> dict[str, pb.WeightsVersion]:
    with Control.find(system.settings) as control:
        return {one.version: one for one in control.weights().versions}


@contextmanager
def engine(client: Client, name: str = "engine-1") -> Iterator[WeightsReporter]:
    with closing(WeightsReporter(client, name)) as reporter:
        yield reporter


def is_retired(system: System, version: str) -> bool:
    found = versions(system).get(version)
    return found is not None and found.is_retired


def test_older_weights_evict_first_after_master_restart(tmp_path: Path) -> None:
    with running_system(tmp_path, "--dram 1MiB --policy lru", catalog="lmdb:") as system:
        with system.client() as client, engine(client) as reporter:
            reporter.use("base", "", [BASE.canonical()])
            until(lambda: "" in versions(system), "the base is known")
            old = put(client, BASE, 4)
            assert client.put(b"first to leave", bytes(VALUE_BYTES), namespace=V1)
            new = put(client, V1, ROOM - 5)
            reporter.use("base", "v1", [V1.canonical()])
            until(lambda: is_retired(system, ""), "the base is retired")
            client.pin(new[:1])  # durable on return, as is all that was written before
            client.unpin(new[:1])
            system.masters[0].kill()
            system.start_master()
            system.await_alive("n0")
            assert is_retired(system, "")
            assert client.get_batch(old) == [bytes(VALUE_BYTES)] * 4, "nothing is removed at once"
            others = iter(range(1000))

            def put_another() -> None:
                client.get_batch(new)
                client.get_batch(old)
                assert client.put(b"another %d" % next(others), bytes(VALUE_BYTES), namespace=V1)

            def an_old_one_has_left() -> bool:
                """The node learns of it from a heartbeat. Until then the block put before is evicted: it was read longest ago."""
                put_another()
                return sum(client.exists_batch(old)) < 4

            until(an_old_one_has_left, "an old block left, though it was read last")
            for _ in range(3):
                put_another()
            assert sum(client.exists_batch(old)) == 0
            assert all(client.exists_batch(new))


def test_a_takeover_keeps_the_table_and_who_uses_what(tmp_path: Path, etcd_url: str) -> None:
    with System(tmp_path, catalog=f"{etcd_url}/{uuid.uuid4()}", masters=2) as system:
        system.start_masters(*LEASE)
        with system.client() as client, engine(client) as reporter, engine(client, "engine-2") as other:
            reporter.use("base", "", [BASE.canonical()])
            until(lambda: "" in versions(system), "the base is known")
            reporter.use("base", "v1", [V1.canonical()])
            other.use("base", "~private-1", [replace(BASE, revision="base@~private-1").canonical()])
            until(lambda: len(versions(system)) == 3 and is_retired(system, ""), "three versions")
            system.masters[0].kill()
            found = versions(system)
            assert (set(found), found[""].is_retired, found["v1"].is_retired) == ({"", "v1"}, True, False)
            assert (list(found["v1"].users), found["v1"].is_used) == (["engine-1"], True)
            until(lambda: "~private-1" in versions(system), "the private one is reported again")
