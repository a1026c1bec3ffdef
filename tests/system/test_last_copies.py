"""The last copy leaves last, with real processes: a node without room gives up what another node keeps."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, STATUS_POLL_S, System, until
from tests.system.test_acks import tied

BLOCK_BYTES = 64 << 10
DRAM_BLOCKS = 64
ALONE = [b"alone-%d" % number for number in range(16)]
SHARED = [b"shared-%d" % number for number in range(16)]
MORE = [b"more-%d" % number for number in range(64)]


def values(keys: list[bytes]) -> list[bytes]:
    return [value_of(key, 0, BLOCK_BYTES) for key in keys]


def at(client: Client, keys: list[bytes], name: str) -> list[bytes]:
    """Those of the keys that the node has."""
    return [key for key, places in zip(keys, client.locate(keys), strict=True) if name in {place.node for place in places}]


@pytest.mark.promise("last-replica-last")
def test_full_node_evicts_replicated_before_colder_blocks(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0, "--home-copy-rate", "0")
        system.start_node("n0", "--dram", str(DRAM_BLOCKS * BLOCK_BYTES), "--policy", "lru")
        system.start_node("n1", "--dram", "32MiB")
        with tied(system, "n0") as client, tied(system, "n1") as other:
            for each, keys in ((client, ALONE), (client, SHARED), (other, SHARED)):
                assert each.put_batch(keys, values(keys)) == [True] * len(keys)
                each.flush(deadline_s=DEADLINE_S)
            assert at(client, SHARED, "n0") == at(client, SHARED, "n1") == SHARED
            more = iter(zip(MORE, values(MORE), strict=True))
            put(client, more, DRAM_BLOCKS - len(ALONE) - len(SHARED) + 1)
            until(lambda: system.node_status().counters["spares"] > 0, "the master has said what n1 keeps", every_s=STATUS_POLL_S)
            spares = system.await_settled().counters["spares"]
            left, shared = at(client, ALONE, "n0"), at(client, SHARED, "n0")
            assert len(left) >= len(ALONE) - 2, "the first left before anybody was asked"
            put(client, more, spares - 1)  # one may have left just before
            system.await_settled()
            assert at(client, ALONE, "n0") == left
            assert len(at(client, SHARED, "n0")) < len(shared)
            assert client.get_batch(SHARED) == values(SHARED)


def put(client: Client, more: Iterator[tuple[bytes, bytes]], count: int) -> None:
    for key, value in islice(more, count):
        assert client.put(key, value)
    client.flush(deadline_s=DEADLINE_S)
