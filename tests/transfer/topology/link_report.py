"""A process that watches the links of its network namespace and prints a line a change, until its standard input ends.

Arguments: the interval in seconds, and "deaf" to watch without netlink's announcements.
"""

import sys

from kvstore.transfer.topology import links
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.links import LinkChange, LinkWatch
from kvstore.transfer.topology.model import Topology


def refuse() -> None:
    raise PermissionError(1, "Operation not permitted")


def report(topology: Topology, changes: list[LinkChange]) -> None:
    print("; ".join(map(str, changes)), "-", ",".join(nic.name for nic in topology.usable()), flush=True)


def main() -> None:
    if "deaf" in sys.argv:
        links.open_changes = refuse  # type: ignore[assignment, attr-defined]
    watch = LinkWatch(Discovery().read_topology, report, poll_interval_s=float(sys.argv[1]))
    watch.start()
    print("ready", flush=True)
    sys.stdin.read()
    watch.close()
    watch.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
