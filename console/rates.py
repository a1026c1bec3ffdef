"""Rates of the counters of nodes and of their hosts' NICs. Sans-I/O: the time is passed in.

Nodes report counters with each heartbeat, so rates are taken between heartbeats, not between polls: a rate between polls would alternate
between 0 and twice the value.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING

MAX_SPAN_S: Final = 60.0
"""Longest time between two counter values for a rate; after a longer gap the rate starts over."""
COUNTED: Final = ("in_bytes", "out_bytes", "transfer_bytes")


@dataclass(slots=True)
class _LastHeartbeat:
    """A node's last heartbeat: time, registration epoch, counters, and the rates up to it."""

    at_s: float
    epoch: Hashable
    counters: Mapping[str, float]
    rates: dict[str, float] = field(default_factory=dict)


SAME_HEARTBEAT_S: Final = 0.01
"""Two times closer than this are the same heartbeat: its time is computed from its age, and varies with the delay of the reply."""
SAME_COUNTERS_S: Final = 0.5
"""With equal counters, times closer than this (half a heartbeat interval) are the same heartbeat in a slow reply."""


class RateTracker:
    """Rates of the counters of several sources, by name. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[str, _LastHeartbeat] = {}

    def of(self, name: str, *, at_s: float, epoch: Hashable, counters: Mapping[str, float]) -> Mapping[str, float]:
        """Return the counters' rates per second up to `at_s`; empty for the first heartbeat of a source or of an epoch.

        A counter that decreased is taken to have restarted at 0.
        """
        last = self._last.get(name)
        if last is None or last.epoch != epoch:
            self._last[name] = _LastHeartbeat(at_s, epoch, counters)
            return self._last[name].rates
        elapsed_s = at_s - last.at_s
        if elapsed_s < SAME_HEARTBEAT_S or (elapsed_s < SAME_COUNTERS_S and counters == last.counters):
            return last.rates
        rates = {key: _grown(value, last.counters.get(key, 0)) / elapsed_s for key, value in counters.items()}
        self._last[name] = _LastHeartbeat(at_s, epoch, counters, rates)
        return rates

    def keep(self, names: Iterable[str]) -> None:
        """Forget all sources but these."""
        for name in self._last.keys() - set(names):
            del self._last[name]


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


class FlowRates:
    """Traffic of the NICs of nodes' hosts. Not thread-safe."""

    def __init__(self) -> None:
        self._rates = RateTracker()
        self._epochs: dict[str, tuple[float, int]] = {}
        """Node -> time of its newest counters, and number of restarts of its rates."""

    def of(self, nodes: Sequence[pb.NodeTopology], at_s: float) -> list[dict[str, Any]]:
        """Return `links` for each node, by the NIC's name: bytes in and out per second by all programs, and those of the node's transfers.

        Empty if not known yet, or the node is dead. Nodes that are not given are forgotten.
        """
        self._epochs = {node.name: self._epochs[node.name] for node in nodes if node.name in self._epochs}
        self._rates.keep(self._epochs)
        return [
            {"node": node.name, "links": {} if node.state in NOT_RUNNING else self._of(node, at_s - node.links_age_s)} for node in nodes
        ]

    def _of(self, node: pb.NodeTopology, at_s: float) -> dict[str, dict[str, float]]:
        counters: dict[str, float] = {f"{name} {link.device}": getattr(link, name) for link in node.links for name in COUNTED}
        last_s, epoch = self._epochs.get(node.name, (at_s, 0))
        epoch += at_s - last_s > MAX_SPAN_S
        self._epochs[node.name] = at_s, epoch
        rates = self._rates.of(node.name, at_s=at_s, epoch=epoch, counters=counters)
        found: dict[str, dict[str, float]] = {}
        for key, rate in rates.items():
            name, _space, device = key.partition(" ")
            found.setdefault(device, {})[f"{name}_per_s"] = float(f"{rate:.4g}")
        return found
