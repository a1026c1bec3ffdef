"""Requests a decision of a master's scheduler from another host, and prints the reply as a line of JSON.

The prompt's blocks are at node `a`, whose instance is busy. The instance at node `b` is idle.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, RequestPlacement, SchedulerClient
from tests.forked import said
from tests.namespaces import TwoHosts
from tests.system.running import DEADLINE_S

BLOCK_TOKENS = 100
BUSY_S = 1.5
"""Of the instance at `a`."""


def ask(hosts: TwoHosts, host: int, master: str, keys: list[str]) -> dict[str, Any]:
    """The test's side."""
    answer: dict[str, Any] = json.loads(said("tests.system.far_scheduler", master, *keys, host=hosts.names[host]))
    return answer


def main() -> None:
    master, *keys = sys.argv[1:]
    with SchedulerClient(ClientSettings(master=master, deadline_s=DEADLINE_S)) as scheduler:
        # The busy one last: what it waits for gets less with time.
        for name, role, node, queue_s in (
            ("pb", InstanceRole.PREFILL, "b", 0.0),
            ("d", InstanceRole.DECODE, "", 0.0),
            ("pa", InstanceRole.PREFILL, "a", BUSY_S),
        ):
            scheduler.report(InstanceReport(name=name, role=role, address=f"http://{name}", node=node, queue_s=queue_s))
        input_tokens = len(keys) * BLOCK_TOKENS + 1
        placed = scheduler.schedule([key.encode() for key in keys], block_tokens=BLOCK_TOKENS, input_tokens=input_tokens, output_tokens=1)
        assert isinstance(placed, RequestPlacement)
        print(json.dumps(asdict(placed)))


if __name__ == "__main__":
    main()
