"""Prometheus exposition: a `prometheus_client` collector that reads values on request and stores nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore.telemetry.metrics.histogram import HistogramSnapshot
from kvstore.telemetry.metrics.metric import Metric, MetricKind, Reading, Readings

Read = Callable[[], Readings]
"""Returns current values of all metrics, or of some. Called in the thread that serves the request."""


FAMILIES: Final[dict[MetricKind, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


class Collected(Collector):
    """Collector of a list of metrics with the values from `read`."""

    def __init__(self, metrics: Sequence[Metric], read: Read) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterator[Family]:
        """Metric names; nothing is read at registration."""
        return (_family(metric) for metric in self._metrics)

    def collect(self) -> Iterator[Family]:
        readings = self._read()
        for metric in self._metrics:
            if metric.name in readings:
                family = _family(metric)
                for labels, value in _values(readings[metric.name]):
                    _add(family, labels, value)
                yield family


def exposed(metrics: Sequence[Metric], read: Read, accept: str) -> tuple[bytes, str]:
    """Exposition of the metrics and of this process, with its content type: OpenMetrics if accepted, else Prometheus
    text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(metrics, read))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(metric: Metric) -> Family:
    return FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels, unit=metric.unit)


def _values(reading: Reading) -> Iterable[tuple[Sequence[str], float | HistogramSnapshot]]:
    return reading.items() if isinstance(reading, Mapping) else [((), reading)]


def _add(family: Family, labels: Sequence[str], value: float | HistogramSnapshot) -> None:
    if isinstance(value, HistogramSnapshot):
        assert isinstance(family, HistogramMetricFamily)
        bounds = [*map(floatToGoString, value.bounds_s), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), sum_value=value.sum_s)
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)
