"""Rates of counters that nodes report, from one report to the next: of a node, and of each NIC of its host. Sans-I/O: time is passed in.

A node tells its counters with each heartbeat, so a rate is taken from heartbeat to heartbeat and not from look to look: else it would be
nothing at one look and twice as much at the next.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING

APART_S: Final = 60.0
"""A rate over longer than this says nothing of now: it begins anew."""
COUNTED: Final = ("in_bytes", "out_bytes", "transfer_bytes")


@dataclass(slots=True)
class _LastHeartbeat:
    """A node's last heartbeat: when, under which registration, with which counters, and the rates up to it."""

    at_s: float
    epoch: Hashable
    counters: Mapping[str, float]
    rates: dict[str, float] = field(default_factory=dict)


SAME_HEARTBEAT_S: Final = 0.01
"""Heartbeats closer than this are one: their age is told, from which the time of one varies by what the telling took."""
SLOWLY_TOLD_S: Final = 0.5
"""So are those closer than this, half a heartbeat's usual interval, with the same counters: the telling may have taken long."""


class RateTracker:
    """The rates of any number of sources by name. Not thread-safe."""

    def __init__(self) -> None:
        self._told: dict[str, _LastHeartbeat] = {}

    def of(self, name: str, *, at_s: float, epoch: Hashable, counters: Mapping[str, float]) -> Mapping[str, float]:
        """What the counters grew by in a second, up to `at_s`; nothing for one that has been heard from once, or has registered anew.

        A counter that fell began again at 0.
        """
        last = self._told.get(name)
        if last is None or last.epoch != epoch:
            self._told[name] = _LastHeartbeat(at_s, epoch, counters)
            return self._told[name].rates
        elapsed_s = at_s - last.at_s
        if elapsed_s < SAME_HEARTBEAT_S or (elapsed_s < SLOWLY_TOLD_S and counters == last.counters):
            return last.rates
        rates = {key: _grown(value, last.counters.get(key, 0)) / elapsed_s for key, value in counters.items()}
        self._told[name] = _LastHeartbeat(at_s, epoch, counters, rates)
        return rates

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        for name in self._told.keys() - set(names):
            del self._told[name]


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


class FlowRates:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._rates = RateTracker()
        self._begun: dict[str, tuple[float, int]] = {}
        """By node: the time of its newest counters, and how often they have begun anew."""

    def of(self, nodes: Sequence[pb.NodeTopology], at_s: float) -> list[dict[str, Any]]:
        """Of these nodes, and all others are forgotten: `links` by the NIC's name, each with what comes in and goes out in a second,
        whoever sends it, and what of that the node's own transfers move; empty where it is not known yet, or the node is dead."""
        self._begun = {node.name: self._begun[node.name] for node in nodes if node.name in self._begun}
        self._rates.keep(self._begun)
        return [
            {"node": node.name, "links": {} if node.state in NOT_RUNNING else self._of(node, at_s - node.links_age_s)} for node in nodes
        ]

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
