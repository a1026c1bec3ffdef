"""A host's links, from the kernel to an operator's screen: in a network namespace whose links are cut and restored."""

import json
from pathlib import Path
from typing import Any

from tests.forked import said
from tests.namespaces import Cut, TwoHosts, two_hosts
from tests.store.daemons import master_flags, node_flags, running
from tests.system.running import until

LOOK_S = 0.1


def topology(hosts: TwoHosts, master: str) -> dict[str, Any]:
    arguments = ("topology", "--master", master, "--node", "n0", "--json")
    found: dict[str, Any] = json.loads(said("kvstore.cli.main", *arguments, host=hosts.names[0]))
    return found


def until_rails_are(hosts: TwoHosts, master: str, *names: str) -> dict[str, Any]:
    found = topology(hosts, master)

    def are_so() -> bool:
        found.update(topology(hosts, master))
        return bool(found["matrix"] == {location: [list(names), []] for location in found["matrix"]})

    until(are_so, f"rails that are {names}", every_s=LOOK_S)
    return found


def test_topology_shows_a_link_that_goes_down_and_up(tmp_path: Path) -> None:
    with two_hosts(0, 0) as hosts:
        here = hosts.names[0]
        with (
            running("master", *master_flags(tmp_path), "--heartbeat-interval-s", "5", log=tmp_path / "master.log", host=here) as master,
            running("node", *node_flags(tmp_path, master.facts["listen"]), log=tmp_path / "node.log", host=here) as node,
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
