"""Figures of a process at Ray's agent are those of its own metrics."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.ray.ray_metrics import RayMetrics


class Sink:
    """Stands for Ray's metrics, by name and tags."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def make(self, kind: str, name: str, text: str, tag_keys: tuple[str, ...]) -> "SinkMetric":
        return SinkMetric(self, name, tag_keys)


class SinkMetric:
    def __init__(self, sink: Sink, name: str, tag_keys: tuple[str, ...]) -> None:
        self._sink, self._name, self._tag_keys = sink, name, tag_keys

    def _key(self, tags: dict[str, str]) -> tuple[str, str]:
        assert set(tags) == set(self._tag_keys), "Ray refuses others"
        return self._name, " ".join(f"{key}={tags[key]}" for key in sorted(tags))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._sink.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses others"
        self._sink.values[self._key(tags)] = self._sink.values.get(self._key(tags), 0.0) + value


class Role(Collector):
    role = "decode"

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("blocks", "Blocks", labels=["role"])
        family.add_metric([self.role], 5)
        yield family


@pytest.fixture
def sink() -> Sink:
    return Sink()


def ray_metrics(sink: Sink, *collectors: Any) -> tuple[RayMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return RayMetrics(registry, {"pool": "decode"}, make=sink.make), registry


def test_counter_has_the_same_total_after_every_update(sink: Sink) -> None:
    metrics, registry = ray_metrics(sink)
    counter = Counter("ended", "Ended", ["outcome"], registry=registry)
    for more in (2, 0, 3):
        counter.labels("done").inc(more)
        metrics.update()
    assert sink.values == {("ended_total", "outcome=done pool=decode"): 5.0}


def test_series_that_ended_with_a_change_of_role_does_not_stay_at_its_last_value(sink: Sink) -> None:
    worker = Role()
    metrics, _ = ray_metrics(sink, worker)
    metrics.update()
    worker.role = "prefill"
    metrics.update()
    assert sink.values == {("blocks", "pool=decode role=decode"): 0.0, ("blocks", "pool=decode role=prefill"): 5.0}


def test_histogram_is_left_to_our_own_port(sink: Sink) -> None:
    metrics, registry = ray_metrics(sink)
    Histogram("seconds", "Seconds", registry=registry).observe(1.0)
    metrics.update()
    assert sink.values == {}
