"""The connector's counters in vLLM's log (`KV Transfer metrics`) and in its /metrics (`vllm:kvstore_*`)."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats, PromMetric, PromMetricT
from vllm.v1.metrics.utils import create_metric_per_engine

from kvstore.engines.vllm.counters import ConnectorCounters, metrics


@dataclass
class KVStoreStats(KVConnectorStats):
    """Counters of one interval: the fields of `ConnectorCounters`."""

    data: dict[str, Any] = field(default_factory=lambda: ConnectorCounters().values())

    def reset(self) -> None:
        self.data = ConnectorCounters().values()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = {name: value + other.data[name] for name, value in self.data.items()}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVStorePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each engine and field of `ConnectorCounters`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](name=metric, documentation=help, labelnames=labelnames), per_engine_labelvalues
            )
            for name, metric, help in metrics()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
