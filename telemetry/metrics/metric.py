"""What a metric is: its name by Prometheus' rules, its kind, its labels, and what it tells. Values are read elsewhere."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.telemetry.metrics.histogram import Counts


class Kind(enum.StrEnum):
    COUNTER = "counter"
    """Only grows, until the process begins anew; its name in the text ends in `_total`."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Times in seconds, in the buckets of histogram.py."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is without `_total`; a unit is its last word: seconds or bytes. `labels` have few values, and none is a key's."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        return next((unit for unit in ("seconds", "bytes") if self.name.endswith(f"_{unit}")), "")

    @property
    def shown_name(self) -> str:
        """As a query names it; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


Value = float | Counts
Reading = float | Mapping[tuple[str, ...], Value]
"""Of one metric: a number, or, of one with labels, a number or a histogram's counts by the labels' values."""
Readings = Mapping[str, Reading]
"""By the metrics' names."""
