"""What flows over each NIC of some hosts: rates of the counters that their nodes told, from one question to the next. Sans-I/O; the time
is passed in.

Nothing is kept of a host that nobody asks for: the first answer after a while knows no rates.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvstore.console.rates import Rates
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import AWAY

APART_S: Final = 60.0
"""A rate over longer than this says nothing of now: it begins anew."""
COUNTED: Final = ("in_bytes", "out_bytes", "transfer_bytes")


class Flows:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._begun: dict[str, tuple[float, int]] = {}
        """By node: the time of its newest counters, and how often they have begun anew."""

    def of(self, nodes: Sequence[pb.NodeTopology], at_s: float) -> list[dict[str, Any]]:
        """Of these nodes, and all others are forgotten: `links` by the NIC's name, each with what comes in and goes out in a second,
        whoever sends it, and what of that the node's own transfers move; empty where it is not known yet, or the node is dead."""
        self._begun = {node.name: self._begun[node.name] for node in nodes if node.name in self._begun}
        self._rates.keep(self._begun)
        return [{"node": node.name, "links": {} if node.state in AWAY else self._of(node, at_s - node.links_age_s)} for node in nodes]

    def _of(self, node: pb.NodeTopology, at_s: float) -> dict[str, dict[str, float]]:
        counters: dict[str, float] = {f"{name} {link.device}": getattr(link, name) for link in node.links for name in COUNTED}
        last_s, epoch = self._begun.get(node.name, (at_s, 0))
        epoch += at_s - last_s > APART_S
        self._begun[node.name] = at_s, epoch
        rates = self._rates.of(node.name, at_s=at_s, epoch=epoch, counters=counters)
        found: dict[str, dict[str, float]] = {}
        for key, rate in rates.items():
            name, _space, device = key.partition(" ")
            found.setdefault(device, {})[f"{name}_per_s"] = float(f"{rate:.4g}")
        return found
