"""An hour of samples in ring buffers: one for the cluster, and a coarser one for each node.

A sample takes 4 bytes per figure: 288 kB for an hour of the cluster (each second, 20 figures), and 8.6 MB for a thousand nodes (every ten
seconds, 6 figures).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LATE_SAMPLES: Final = 2
"""Up to this many missing samples are a late poll, not a gap: the next sample fills them."""


class SampleRing:
    """Ring buffer of the last `samples` values of named figures. Missing values are NaN. Not thread-safe."""

    def __init__(self, names: Sequence[str], samples: int) -> None:
        self.names = tuple(names)
        self._columns: npt.NDArray[np.float32] = np.full((len(names), samples), np.nan, np.float32)
        self._next = 0

    def add(self, figures: Mapping[str, float | None]) -> None:
        """Add a sample, replacing the oldest. Figures of unknown names are ignored."""
        values = (figures.get(name) for name in self.names)
        self._columns[:, self._next % self._columns.shape[1]] = [np.nan if value is None else value for value in values]
        self._next += 1

    def skip(self, samples: int) -> None:
        """Record this many missing samples."""
        for _ in range(min(samples, self._columns.shape[1])):
            self.add({})

    def last(self, samples: int) -> dict[str, list[float | None]]:
        """Return the newest `samples` of each figure, oldest first. None: missing."""
        size = self._columns.shape[1]
        count = min(samples, self._next, size)
        columns = self._columns.take(range(self._next - count, self._next), axis=1, mode="wrap")
        # Four digits are enough for a chart, and halve the JSON.
        return {name: [_short(value) for value in column] for name, column in zip(self.names, columns.tolist(), strict=True)}


class _SampleSchedule:
    """Decides when a sample is due, and how many are missing before a late one."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.last_s: float | None = None

    def missed(self, at_s: float) -> int | None:
        """Return the number of missing samples before the one at `at_s`, which counts as taken; None if it is not due."""
        intervals = 1 if self.last_s is None else round((at_s - self.last_s) / self.interval_s)
        if intervals < 1:
            return None
        self.last_s = at_s
        return intervals - 1


class History:
    """Ring buffers of the cluster and of its nodes, filled by `add`. Not thread-safe."""

    def __init__(
        self, names: Sequence[str], node_names: Sequence[str], *, span_s: float, interval_s: float, node_interval_s: float, max_nodes: int
    ) -> None:
        """Samples the cluster every `interval_s` and nodes every `node_interval_s`. Nodes beyond `max_nodes` have no history."""
        self._node_names, self._node_samples = tuple(node_names), max(1, round(span_s / node_interval_s))
        self._max_nodes = max_nodes
        self._pace, self._node_pace = _SampleSchedule(interval_s), _SampleSchedule(node_interval_s)
        self._cluster = SampleRing(names, max(1, round(span_s / interval_s)))
        self._nodes: dict[str, SampleRing] = {}

    def add(
        self,
        at_s: float,
        figures: Mapping[str, float | None],
        nodes: Mapping[str, Mapping[str, float | None]],
        *,
        rested_s: float = 0.0,
    ) -> None:
        """Add the figures at `at_s`, by a monotonic clock. Failed polls leave gaps.

        An intended pause of `rested_s` before this poll leaves none: the rates are means over it.
        """
        if (missed := self._pace.missed(at_s)) is not None:
            stands_for = LATE_SAMPLES + round(rested_s / self._pace.interval_s)
            for _ in range(missed if missed <= stands_for else 0):
                self._cluster.add(figures)
            self._cluster.skip(missed if missed > stands_for else 0)
            self._cluster.add(figures)
        if (missed := self._node_pace.missed(at_s)) is not None:
            for ring in self._nodes.values():
                ring.skip(missed)
            self._add_nodes(nodes)

    def cluster(self, samples: int) -> dict[str, Any]:
        """Return the newest `samples` of the cluster: the interval and a list per figure, oldest first."""
        return {"interval_s": self._pace.interval_s, "series": self._cluster.last(samples)}

    def node(self, name: str, samples: int) -> dict[str, Any]:
        """As `cluster`; empty lists for a node without history."""
        ring = self._nodes.get(name) or SampleRing(self._node_names, 1)
        return {"interval_s": self._node_pace.interval_s, "series": ring.last(samples)}

    def _add_nodes(self, nodes: Mapping[str, Mapping[str, float | None]]) -> None:
        for name in self._nodes.keys() - nodes.keys():
            del self._nodes[name]  # forgotten nodes; dead ones are still in the status
        for name, figures in nodes.items():
            ring = self._nodes.get(name)
            if ring is None:
                if len(self._nodes) >= self._max_nodes:
                    continue
                ring = self._nodes[name] = SampleRing(self._node_names, self._node_samples)
            ring.add(figures)


def _short(value: float) -> float | None:
    return None if value != value else float(f"{value:.4g}")
