"""Copies between two nodes in processes of their own, by order of a master in this one: what they are for, and what they must not do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.credentials import OPERATOR, tokens_file
from tests.master.running import Places, master_in_thread
from tests.store.served import Client as Reader
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, until
from tests.tickets import hello_to_node

TENANT = "red"
KEYS = [b"block-%d" % number for number in range(100)]
VALUES = [value_of(key, 0, (700, 70_000, 200_000)[number % 3]) for number, key in enumerate(KEYS)]


class Cluster(System):
    """A master in this process, and the nodes `a`, which holds what is put, and `b`, which is started after it."""

    def __init__(self, folder: Path, places: Places, token: str = "") -> None:
        self.places = places
        self.token = token
        super().__init__(folder)
        self.settings = ClientSettings(master=self.address, token=OPERATOR if token else "", deadline_s=5.0)

    def __enter__(self) -> Self:
        return self

    @property
    def address(self) -> str:
        return self.places.listen

    def fill(self) -> Client:
        """All of KEYS at `a`; the client that put them."""
        self.start_node("a", "--dram", "32MiB")
        client = self.client(tenant=TENANT, token=self.token)
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        self.start_node("b", "--dram", "32MiB")
        return client

    def replicate(self, keys: list[bytes] = KEYS) -> None:
        self.places.replicate(TENANT, keys, node_id=2, source_node_id=1)

    def counters(self, name: str = "b") -> dict[str, int]:
        """Return the counters of the node's newest heartbeat; wait for its first."""
        until(lambda: "copied_blocks" in self.node_status(name).counters, f"a heartbeat of {name}")
        return dict(self.node_status(name).counters)

    def await_copies(self, count: int) -> None:
        """Wait until `b` has so many copies, and nothing of them is under way."""

        def are_there() -> bool:
            counters = self.counters()
            return (counters["copied_blocks"], counters["copies_waiting"], counters["open_puts"]) == (count, 0, 0)

        until(are_there, f"{count} copies at b")

    def read_from(self, name: str) -> list[bytes | None]:
        """Read KEYS from that node."""
        address = Address(unix=self.nodes[name].facts("ready", deadline_s=DEADLINE_S)["unix"])
        reader = Reader(Channel.open(address, hello_to_node(self.address, TENANT, self.token, node=name), Deadline(DEADLINE_S)))
        try:
            return reader.read(*(key.decode() for key in KEYS), inline_bytes=1 << 20)[1]
        finally:
            reader.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with master_in_thread(tmp_path / "m", heartbeat_interval_s=0.05, node_ttl_s=60.0) as places, Cluster(tmp_path, places) as started:
        yield started


@pytest.mark.promise("replicas-survive")
def test_copies_have_the_bytes_and_outlive_their_source(cluster: Cluster) -> None:
    with cluster.fill() as client:
        assert cluster.read_from("b") == [None] * len(KEYS)
        cluster.replicate()
        cluster.await_copies(len(KEYS))
        assert [[place.node for place in found] for found in client.locate(KEYS)] == [["a", "b"]] * len(KEYS)
        generations = {place.generation for found in client.locate(KEYS[:1]) for place in found}
        assert len(generations) == 1, "two holders of one version"
        assert cluster.read_from("b") == VALUES
        assert cluster.counters()["copied_bytes"] == sum(map(len, VALUES))
        cluster.kill_node("a")
        assert client.get_batch(KEYS, deadline_s=5.0) == VALUES, "a client with places in mind"
        with cluster.client(tenant=TENANT) as newcomer:
            assert newcomer.get_batch(KEYS) == VALUES
            assert newcomer.exists_batch(KEYS) == [True] * len(KEYS)


@pytest.mark.promise("copies-versioned")
def test_a_removal_reaches_every_copy(cluster: Cluster) -> None:
    with cluster.fill() as client:
        cluster.replicate()
        cluster.await_copies(len(KEYS))
        assert client.remove(KEYS) == len(KEYS)
        assert cluster.read_from("a") == cluster.read_from("b") == [None] * len(KEYS)


@pytest.mark.promise("copies-versioned")
def test_a_block_removed_while_it_is_copied_does_not_come_back(cluster: Cluster) -> None:
    """The removal meets blocks in each state: queued, in flight, or just entered by the master."""
    with cluster.fill() as client:
        cluster.replicate()
        for part in (KEYS[90:], KEYS[::10]):
            gone = [key for key in part if client.remove([key])]
            assert gone, "removals succeed"
            until(lambda: not cluster.counters()["copies_waiting"], "no copy under way")
            assert client.exists_batch(gone) == [False] * len(gone)
            at_b = dict(zip(KEYS, cluster.read_from("b"), strict=True))
            assert not any(at_b[key] for key in gone)
            cluster.replicate()
        known = dict(zip(KEYS, client.exists_batch(KEYS), strict=True))
        assert not any(value is not None and not known[key] for key, value in at_b.items()), "b holds what the master does not know"


@pytest.mark.promise("copies-versioned")
def test_copy_with_dying_source_is_right_or_absent(cluster: Cluster) -> None:
    with cluster.fill() as client:
        cluster.replicate()
        cluster.kill_node("a")

        def is_over() -> bool:
            counters = cluster.counters()
            return counters["copied_blocks"] + counters["copies_failed"] == len(KEYS) and not counters["open_puts"]

        until(is_over, "nothing under way")
        until(lambda: cluster.node_status("a").state == "dead", "the master knows")
        at_b = cluster.read_from("b")
        assert all(found in (None, value) for found, value in zip(at_b, VALUES, strict=True))
        assert client.get_batch(KEYS) == at_b


@pytest.mark.promise("authentication")
def test_copy_between_nodes_works_with_tokens(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, {"red": "secret", "blue": "other"})
    with (
        master_in_thread(tmp_path / "m", heartbeat_interval_s=0.05, tokens=tokens) as places,
        Cluster(tmp_path, places, "secret") as cluster,
        cluster.fill() as client,
    ):
        cluster.replicate()
        cluster.await_copies(len(KEYS))
        assert client.get_batch(KEYS) == cluster.read_from("b") == VALUES
