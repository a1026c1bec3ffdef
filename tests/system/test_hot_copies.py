"""Copies of hot blocks, with real processes: what other hosts read much is at a second node, and the first to leave it when they do not."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client.reads import replica_lookup as finding
from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, running_system, until
from tests.system.test_acks import tied

BLOCK_BYTES = 64 << 10
DRAM_BLOCKS = 64
HOT = b"hot"
ASKED_AGAIN_NS = 100_000_000
"""After this long clients ask again where it is."""
READS_PER_S = 1.0
"""Far fewer than any machine reads in a loop."""
OWN = {name: [b"%s-own-%d" % (name.encode(), number) for number in range(DRAM_BLOCKS // 2)] for name in ("n1", "n2")}
MORE = [b"more-%d" % number for number in range(DRAM_BLOCKS)]


def value(key: bytes) -> bytes:
    return value_of(key, 0, BLOCK_BYTES)


def places(client: Client, key: bytes = HOT) -> list[str]:
    """The nodes that have it."""
    return sorted(place.node for place in client.locate([key])[0])


def put(client: Client, keys: list[bytes]) -> None:
    assert client.put_batch(keys, [value(key) for key in keys]) == [True] * len(keys)
    client.flush(deadline_s=DEADLINE_S)


def given(system: System, name: str) -> int:
    """Bytes that the node has given to readers."""
    return system.node_status(name).counters["out_bytes"]


@contextlib.contextmanager
def far_clients(system: System, count: int) -> Iterator[list[Client]]:
    """Clients as on hosts of their own, each with another number among its host's."""
    with contextlib.ExitStack() as stack:
        made = []
        for spread in range(count):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvstore.client.operations.os.getpid", lambda spread=spread: spread)
                made.append(stack.enter_context(system.remote_client()))
        yield made


def read_until(readers: list[Client], is_so: Callable[[], bool], what: str) -> None:
    """Have all of them read the block again and again."""

    def read() -> bool:
        assert [reader.get(HOT) for reader in readers] == [value(HOT)] * len(readers)
        return is_so()

    until(read, what, every_s=STATUS_POLL_S, max_every_s=0)


@pytest.mark.promise("last-replica-last")
def test_hot_block_is_copied_and_the_copy_evicted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "REMOTE_HINT_TTL_NS", ASKED_AGAIN_NS)
    with System(tmp_path) as system:
        system.node_module = "tests.system.quick_node"
        system.start_master(0, "--hot-copies", "1", "--hot-reads-per-s", str(READS_PER_S), "--home-copy-rate", "0")
        for name in ("n0", "n1", "n2"):
            system.start_node(name, "--dram", str(DRAM_BLOCKS * BLOCK_BYTES), "--policy", "lru")
        with tied(system, "n0") as client, far_clients(system, 8) as readers:
            put(client, [HOT])
            for name, keys in OWN.items():
                with tied(system, name) as other:
                    put(other, keys)
            assert places(client) == ["n0"]
            read_until(readers, lambda: len(places(client)) > 1, "a second node has it")
            [_, copy] = places(client)
            [third] = {"n1", "n2"} - {copy}
            before = {name: given(system, name) for name in ("n0", copy)}
            read_until(readers, lambda: all(given(system, name) > before[name] for name in before), "both give it to readers")
            assert given(system, third) == 0

            def is_counted() -> bool:
                """The master counts a copy a step after clients find it."""
                status = system.status().counters
                return (status["hot_copies"], status["hot_copied_bytes"], status["hot_blocks"]) == (1, BLOCK_BYTES, 1)

            read_until(readers, is_counted, "the master reports one copy")
            until(lambda: system.node_status(copy).counters["copied_blocks_hot"] == 1, "its node reports why", every_s=STATUS_POLL_S)
            until(lambda: system.status().counters["hot_blocks"] == 0, "it has cooled", every_s=STATUS_POLL_S)
            assert places(client) == ["n0", copy], "nobody deletes it"
            with tied(system, copy) as other:
                put(other, MORE[: DRAM_BLOCKS // 2 - 2])
                more = iter(MORE[DRAM_BLOCKS // 2 - 2 :])

                def has_left() -> bool:
                    put(other, [next(more)])
                    system.await_settled(copy)
                    return places(client) == ["n0"]

                until(has_left, "the copy has left")
                left = [key for key in OWN[copy] if places(client, key) == [copy]]
                assert len(left) >= len(OWN[copy]) - 2, (
                    "what nobody else has stays though it is colder, but for what left before anybody was asked"
                )
                assert client.get(HOT) == value(HOT)


@pytest.mark.promise("last-replica-last")
def test_hot_copies_disabled_keep_blocks_in_place(tmp_path: Path) -> None:
    with running_system(tmp_path, "--dram 32MiB", nodes=("n0", "n1")) as system:
        with tied(system, "n0") as client, far_clients(system, 1) as readers:
            put(client, [HOT])
            before = given(system, "n0")
            read_until(readers, lambda: given(system, "n0") > before + 100 * BLOCK_BYTES, "it is read a hundred times")
            assert places(client) == ["n0"]
            assert system.status().counters["hot_copies"] == 0
