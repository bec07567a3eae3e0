"""Counts of transfers, as vLLM logs them ("KV Transfer metrics") and shows them in `/metrics`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from engine.vllm.connector.orders import COUNTS


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # there are no types without vLLM
    """Counts by name, of all ranks."""

    data: dict[str, float]

    def reset(self) -> None:
        """See `KVConnectorStats`."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "TransferStats":
        """See `KVConnectorStats`."""
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTS}
        return self

    def reduce(self) -> dict[str, int | float]:
        """See `KVConnectorStats`."""
        return {name.replace("_", " "): round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """See `KVConnectorStats`."""
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters of one server, `vllm:kvrelay_…`."""

    def __init__(self, config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, metric_types, labels, values)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvrelay_{name}", documentation=text, labelnames=labels)
            for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See `KVConnectorPromMetrics`."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
