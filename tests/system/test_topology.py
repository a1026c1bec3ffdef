"""A host's links, from the kernel to an operator's screen: in a network namespace whose links are cut and restored."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.namespaces import Cut, TwoHosts, two_hosts
from tests.store.daemons import master_flags, node_flags, running

LOOKS = 60
"""Each takes half a second, for the start of the command; the change is to be seen by then."""


def topology(hosts: TwoHosts, master: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstore.client.cli.main", "topology", "--master", master, "--node", "n0", "--json"]
    found: dict[str, Any] = json.loads(hosts.run(0, command))
    return found


def until_rails_are(hosts: TwoHosts, master: str, *names: str) -> dict[str, Any]:
    for _ in range(LOOKS):
        found = topology(hosts, master)
        if found["matrix"] == {location: [list(names), []] for location in found["matrix"]}:
            return found
    raise AssertionError(f"the rails never were {names}: {found}")


def test_a_link_of_a_nodes_host_that_goes_down_and_up_is_shown_as_such(tmp_path: Path) -> None:
    with two_hosts(0, 0) as hosts:
        here = hosts.prefix(0)
        with (
            running("master", *master_flags(tmp_path), "--heartbeat-interval-s", "5", log=tmp_path / "master.log", prefix=here) as master,
            running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log", prefix=here) as node,
        ):
            assert node.line()["event"] == "ready"
            listen = master.facts["listen"]
            until_rails_are(hosts, listen, "rail0", "rail1")
            hosts.cut(1, Cut.LINK_DOWN)
            found = until_rails_are(hosts, listen, "rail0")
            assert {nic["name"]: nic["is_up"] for nic in found["nics"]} == {"lo": True, "rail0": True, "rail1": False}
            hosts.restore(1)
            until_rails_are(hosts, listen, "rail0", "rail1")
            assert node.stop() == 0
