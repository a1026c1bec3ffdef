"""Ports of a cluster: the daemons' defaults, and the ports that deploy/ sets.

All differ, so that one host can run every daemon. A daemon whose default is 0 takes a free port and registers it with
its master; behind a firewall, or for an orchestrator's health checks, set the port listed here.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which `daemon` listens; `what` describes its use."""

    number: int
    daemon: str
    what: str


MASTER: Final = Port(7440, "kvstore-master", "clients and nodes: frames (listen)")
CONTROL: Final = Port(7441, "kvstore-master", "the control plane: gRPC (control)")
MASTER_HTTP: Final = Port(7442, "kvstore-master", "health, metrics, console (http)")
NODE: Final = Port(7450, "kvstore-node", "clients of other hosts: frames (listen)")
NODE_HTTP: Final = Port(7452, "kvstore-node", "health, metrics (http)")
TRANSFER: Final = Port(7460, "kvstore-node", "the transfer engine; further transports take the next ports ([transfer] listen_port)")
ROUTER_HTTP: Final = Port(7472, "kvstore-router", "health, metrics (http)")
SIDECAR_HTTP: Final = Port(7482, "kvstore-sidecar", "health, metrics (http)")
PUBLISHER_HTTP: Final = Port(7492, "kvstore-publisher", "health, metrics, queries of other routers (http)")
ROUTER: Final = Port(8000, "kvstore-router", "requests to engines: HTTP (listen)")
PORTS: Final = (MASTER, CONTROL, MASTER_HTTP, NODE, NODE_HTTP, TRANSFER, ROUTER_HTTP, SIDECAR_HTTP, PUBLISHER_HTTP, ROUTER)
