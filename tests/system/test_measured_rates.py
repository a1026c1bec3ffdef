"""Rates that a node's engine measures between two hosts reach the scheduler and change its choice."""

import json
import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tests.forked import said
from tests.namespaces import TwoHosts, two_hosts
from tests.store.daemons import running
from tests.system.far_client import FarClient
from tests.system.far_scheduler import ask
from tests.system.hosts import MASTER, master_flags, node_flags
from tests.system.running import MIB, PROCESS_POLL_S, until

RATE_GBIT_S = 0.1
RATE_BYTES_S = RATE_GBIT_S * 1e9 / 8
FIRST = [[f"first-{pair}-0", f"first-{pair}-1"] for pair in range(8)]
"""Pairs: a transfer that a loaded machine gave up (`copy_timeout_s`) has measured nothing, and the next pair measures."""
SECOND = [f"second-{number}" for number in range(40)]
"""Blocks of 1 MiB. A sender that says nothing is taken to send the second prompt's in 34 ms; by this rail they take more than 3 s, which is
longer than to compute them, and than to wait for who has them (far_scheduler.BUSY_S)."""


def nodes(hosts: TwoHosts, master: str) -> dict[str, dict[str, Any]]:
    found = json.loads(said("kvstore.cli.main", "status", "--master", master, "--json", host=hosts.names[0]))["nodes"]
    return {node["name"]: node for node in found}


def has_settled(hosts: TwoHosts, master: str, blocks: int) -> bool:
    """Return whether so many blocks have been copied to `b` or given up; a rate measured by them came with the same heartbeat."""
    counters = nodes(hosts, master)["b"]["counters"]
    return int(counters["copied_blocks"]) + int(counters["copies_failed"]) >= blocks


def test_blocks_avoid_a_rail_measured_to_be_slow(tmp_path: Path) -> None:
    with two_hosts(RATE_GBIT_S) as hosts:
        here, there = hosts.rails[0].addresses
        master = f"{here}:{MASTER}"
        flags = [*master_flags(here, tmp_path / "m", control=here), "--heartbeat-interval-s", "0.05"]
        flags += ["--node-ttl-s", "60", "--instance-ttl-s", "600", "--measured-rate-ttl-s", "600"]
        node = {name: node_flags(master, address, name, tmp_path / name) for name, address in (("a", here), ("b", there))}
        (tmp_path / "a").mkdir()
        with (
            running("master", *flags, log=tmp_path / "master.log", host=hosts.names[0]),
            running("node", *node["a"], "--dram", "64MiB", log=tmp_path / "a.log", host=hosts.names[0]) as a,
        ):
            assert a.line()["event"] == "ready"
            with FarClient(hosts, 0, master) as client:
                assert client.put([*chain(*FIRST), *SECOND], MIB)["done"] == [True] * 56
            with running(
                *("node", *node["b"], "--dram", "64MiB"),
                log=tmp_path / "b.log",
                host=hosts.names[1],
                hidden=[str(tmp_path / "a")],  # else it would reach `a` by its Unix socket
            ) as b:
                ready = b.line()
                assert ready["event"] == "ready"
                for settled, pair in enumerate(FIRST, 1):
                    first = ask(hosts, 0, master, pair)
                    assert (first["prefill"], first["transfer_from"], first["transfer_blocks"]) == ("pb", "pa", 2)
                    until(partial(has_settled, hosts, master, 2 * settled), "b has the pair or gave it up", every_s=PROCESS_POLL_S)
                    if nodes(hosts, master)["b"].get("rates"):
                        break
                else:
                    raise AssertionError((tmp_path / "b.log").read_text())
                found = nodes(hosts, master)
                (rate,) = found["b"]["rates"]
                assert rate["node_id"] == found["a"]["node_id"]
                assert 0 < rate["bytes_per_s"] < 2 * RATE_BYTES_S
                assert rate["basis_bytes"] > 256 << 10
                assert not found["a"].get("rates"), "it has received nothing"
                metrics = hosts.run(1, ["curl", "-s", f"http://{ready['http']}/metrics"])
                rails = re.findall(r"^kvstore_node_rail_delivered_bytes_total\{(.*)\} (\S+)$", metrics, re.MULTILINE)
                assert [(labels, float(moved) >= 2 * MIB) for labels, moved in rails] == [
                    (f'rail="{hosts.rails[0].device}",transport="tcp"', True)
                ], metrics
                second = ask(hosts, 0, master, SECOND)
                assert (second["prefill"], second["transfer_from"], second["prefix_blocks"]) == ("pb", "", 0)
