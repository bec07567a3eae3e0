"""Repeats a process's Prometheus metrics as metrics of Ray, for the port and the dashboard of Ray's agent.

The figures are those of the registry that the process serves itself. Ray adds `ray_` to their names. Histograms are
left out: Ray's take single observations, not sums. Ray's agent exists with `ray[default]` only.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray.util.metrics import Counter, Gauge

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Ray itself passes them on every 10 s by default."""
_SUFFIXES = {"gauge": "", "counter": "_total"}

_Tags = tuple[tuple[str, str], ...]
Make = Callable[[str, str, str, tuple[str, ...]], Any]
"""Makes a Ray metric of a type ("gauge", "counter"), a name, a text and tag keys."""


def has_agent() -> bool:
    """Return whether Ray's agent on this host takes metrics; it publishes its port when it starts."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == here and node["MetricsExportPort"] > 0 for node in nodes)


def make_ray_metric(kind: str, name: str, text: str, tag_keys: tuple[str, ...]) -> Any:
    """Return a metric of Ray; needs a process of Ray."""
    return (Gauge if kind == "gauge" else Counter)(name, description=text, tag_keys=tag_keys)


class RayMetrics:
    """The metrics of one process in Ray. Event loop only."""

    def __init__(self, registry: CollectorRegistry, tags: Mapping[str, str], make: Make = make_ray_metric) -> None:
        """`tags` are added to the labels of every metric."""
        self._registry = registry
        self._tags = dict(tags)
        self._make = make
        self._metrics: dict[str, Any] = {}
        self._sent: dict[str, dict[_Tags, float]] = {}
        """Last value of each series, by the metric's name."""

    def update(self) -> None:
        """Send Ray the present values. A gauge's series that has ended becomes 0: Ray would show its last value."""
        for family in self._registry.collect():
            suffix = _SUFFIXES.get(family.type)
            if suffix is None:
                continue
            name = family.name + suffix
            values = {
                tuple(sorted((sample.labels | self._tags).items())): float(sample.value)
                for sample in family.samples
                if sample.name == name
            }
            sent = self._sent.setdefault(name, {})
            if family.type == "gauge":
                values = dict.fromkeys(sent, 0.0) | values
            for tags, value in values.items():
                self._send(family.type, name, family.documentation, tags, value)
            sent |= values

    def _send(self, kind: str, name: str, text: str, tags: _Tags, value: float) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._make(kind, name, text, tuple(key for key, _ in tags))
        if kind == "gauge":
            metric.set(value, dict(tags))
        elif (more := value - self._sent[name].get(tags, 0.0)) > 0:
            metric.inc(more, dict(tags))

    async def update_forever(self) -> None:
        """Update every `PERIOD_S` until cancelled; what fails is logged and tried again."""
        while True:
            try:
                self.update()
            except (RuntimeError, ValueError, TypeError) as error:
                logger.warning("cannot report metrics to Ray", extra={"reason": str(error)})
            await asyncio.sleep(PERIOD_S)
