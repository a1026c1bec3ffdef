"""Exchange of what eviction policies learn, with real processes: what one node observed reaches new ones."""

from itertools import count
from pathlib import Path

from kvstore.client.sync import Client
from tests.system.running import System, until
from tests.system.test_acks import tied

BLOCK_BYTES = 4096
KEYS = [b"block-%d" % number for number in range(200)]
PUT_EVERY_S = 0.5
"""A node reports while blocks are stored or read: ten seconds later, if its last report was too early."""


def of_others(system: System, name: str) -> int:
    return system.node_status(name).counters["reuse_of_others"]


def test_new_nodes_begin_with_what_another_has_learned(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master()
        system.start_node("n0", "--dram", "16MiB")
        with tied(system, "n0") as client:
            assert client.put_batch(KEYS, [bytes(BLOCK_BYTES)] * len(KEYS)) == [True] * len(KEYS)
            client.flush()
            assert client.get_batch(KEYS)[0] is not None
        until(lambda: system.status().counters["reuse_reports"] >= 1, "n0 reports")
        assert of_others(system, "n0") == 0
        for name in ("n1", "n2"):
            system.start_node(name, "--dram", "16MiB")
            with tied(system, name) as client:
                until(lambda name=name, client=client: learns(system, name, client), f"{name} knows more", every_s=PUT_EVERY_S)  # type: ignore[misc]
            assert system.node_status(name).counters["reuse_exchanges"] >= 1
        assert system.status().counters["reuse_refused"] == 0


numbers = count()


def learns(system: System, name: str, client: Client) -> bool:
    assert client.put(b"%s-%d" % (name.encode(), next(numbers)), bytes(BLOCK_BYTES))
    return of_others(system, name) > 0
