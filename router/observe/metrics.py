"""Prometheus metrics of the router, from life-cycle stamps and workers' reports. Labels are bounded."""

import asyncio
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.clock import Clock
from common.errors import RefusalCause
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import worker_pb2
from router.fleet.decisions import DecisionRecord
from router.observe.alarms import AlarmKind, Alarms
from router.record.account import Account, Service
from router.record.record import RunningRequest

_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ERRORS = (-0.5, -0.2, -0.1, -0.05, -0.01, 0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
_RATIOS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 5.0, 10.0)
LAG_INTERVAL_S = 0.25


class WeightedHistogram(Collector):
    """A histogram that takes many equal values at once, because tokens come in runs.

    One thread observes; a scrape, on another thread, may see the last value half-counted.
    """

    def __init__(self, name: str, text: str, *, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family."""
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._text, buckets=list(buckets), sum_value=self._sum)


class _States(Collector):
    """Workers by name, role and state."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, str, str]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family."""
        family = GaugeMetricFamily(
            "kvrelay_worker_state", "1: the worker is in this state", labels=["worker", "role", "state"]
        )
        for labels in self._read():
            family.add_metric(labels, 1)
        yield family


class RouterMetrics:
    """The metrics registry of one router. Event loop only; a scrape reads it from another thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._histogram("kvrelay_ttft_seconds", "Request received to first token sent", _LATENCY_S)
        self._itl = WeightedHistogram("kvrelay_itl_seconds", "Gap between tokens of the first sample", buckets=_GAP_S)
        self.registry.register(self._itl)
        self._tpot = self._histogram("kvrelay_tpot_seconds", "(last - first token) / (tokens - 1)", _GAP_S)
        self._e2e = self._histogram("kvrelay_e2e_seconds", "Request received to last token sent", _LATENCY_S)
        self._queue = self._histogram("kvrelay_queue_seconds", "Request received to start of prefill", _LATENCY_S)
        self._prefill = self._histogram("kvrelay_prefill_seconds", "Prefill computation", _LATENCY_S)
        self._transfer = self._histogram("kvrelay_transfer_seconds", "First to last KV block received", _LATENCY_S)
        self._requests = self._counter("kvrelay_requests", "Requests ended", "outcome")
        self._replans = self._counter("kvrelay_replans", "Plans made again after a failure", "reason")
        self._refusals = self._counter("kvrelay_worker_refusals", "Requests sent back by a full worker", "role")
        self._cancels = self._counter("kvrelay_cancels", "Requests cancelled by the client")
        self._predicted = self._counter("kvrelay_predicted_cached_tokens", "Prompt tokens expected in the cache")
        self._actual = self._counter("kvrelay_actual_cached_tokens", "Prompt tokens found in the cache")
        self._tier_blocks = self._counter("kvrelay_planned_tier_blocks", "Blocks that plans read from tiers")
        self._tier_s = self._counter("kvrelay_planned_tier_read_seconds", "Predicted waits for nothing but these reads")
        self._reads_ahead = self._counter(
            "kvrelay_reads_ahead", "Waiting requests whose blocks a worker read from tiers", "outcome"
        )
        self._cache_error = self._histogram(
            "kvrelay_prediction_cached_tokens_error", "(predicted - actual cached tokens) / tokens", _ERRORS
        )
        self._ttft_ratio = self._histogram(
            "kvrelay_prediction_ttft_ratio", "Predicted / actual time to first token", _RATIOS
        )
        self._tpot_ratio = self._histogram(
            "kvrelay_prediction_tpot_ratio", "Predicted / actual mean gap between tokens", _RATIOS
        )
        self._lag = self._histogram("kvrelay_event_loop_lag_seconds", "Lateness of the event loop", _GAP_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def watch(self, name: str, text: str, read: Callable[[], int]) -> None:
        """Export a gauge that is read at each scrape, on the scraper's thread."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def watch_states(self, read: Callable[[], Iterable[tuple[str, str, str]]]) -> None:
        """Export the state of each worker; `read` returns name, role and state of them, on the scraper's thread."""
        self.registry.register(_States(read))

    def watch_alarms(self, alarms: Alarms) -> None:
        """Export each alarm as a gauge that is 1 while the alarm is raised."""
        gauge = Gauge("kvrelay_routing_alarm", "1: this alarm stands", ["kind"], registry=self.registry)
        for kind in AlarmKind:
            gauge.labels(kind.value).set_function(partial(alarms.is_raised, kind))

    def observe(self, record: RunningRequest, *, exemplar: dict[str, str] | None = None) -> None:
        """Observe the durations of a completed request; `exemplar` names its trace, if it has one."""
        timings, gaps = record.timings, record.ledger.gaps
        if record.job.embedding is None:
            self._ttft.observe(timings.ttft_s, exemplar)
        self._e2e.observe(timings.e2e_s, exemplar)
        self._queue.observe(timings.queue_s, exemplar)
        self._prefill.observe(timings.prefill_s, exemplar)
        if record.transfer.num_blocks:
            self._transfer.observe(timings.transfer_s, exemplar)
        if gaps:
            self._tpot.observe(timings.tpot_s, exemplar)
        for gap_s, count in gaps:
            self._itl.observe(gap_s, count)

    def count_request(self, outcome: str) -> None:
        """Count an ended request: "completed", "cancelled", or the name of its error class."""
        self._requests.labels(outcome).inc()
        if outcome == "cancelled":
            self._cancels.inc()

    def count_replan(self, reason: str) -> None:
        """Count a replan; `reason` is the name of an error class."""
        self._replans.labels(reason).inc()

    def count_refusal(self, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Count a request that a worker had no room for."""
        self._refusals.labels(ROLE_NAMES[role]).inc()

    def count_read_ahead(self, outcome: str) -> None:
        """Count a request for which a worker has read blocks while it waited (`ReadAheadOutcome`)."""
        self._reads_ahead.labels(outcome).inc()

    def compare_cached_tokens(self, *, predicted: int, actual: int) -> None:
        """Count the cached tokens that the index predicted and that the worker found."""
        self._predicted.inc(predicted)
        self._actual.inc(actual)

    def compare_outcome(self, decision: DecisionRecord) -> None:
        """Count an ended decision, and compare its predictions with the outcome."""
        plan = decision.plan
        self._tier_blocks.inc(sum(plan.tier_reads.values()))
        self._tier_s.inc(plan.predicted_tier_read_s)
        if decision.num_cached_tokens is not None:
            error = plan.predicted_cached_tokens - decision.num_cached_tokens
            self._cache_error.observe(error / max(decision.num_tokens, 1))
        for ratio, predicted_s, actual_s in (
            (self._ttft_ratio, plan.predicted_ttft_s, decision.ttft_s),
            (self._tpot_ratio, plan.predicted_tpot_s, decision.tpot_s),
        ):
            if predicted_s is not None and actual_s:
                ratio.observe(predicted_s / actual_s)

    async def watch_event_loop(self, clock: Clock) -> None:
        """Measure how late the event loop wakes a sleeper, until cancelled."""
        while True:
            started_s = clock.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(clock.monotonic() - started_s - LAG_INTERVAL_S, 0.0))


MAX_LABELS = 100
OTHERS = "others"
_QUEUE_S = (0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0)


class TenantMetrics(Collector):
    """Counters and gauges of tenants. Event loop only; a scrape reads from another thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: dict[str, str] = {}
        self._num_refused: Counts[tuple[str, str]] = Counts()
        self._read_accounts: Callable[[], Iterable[Account]] = tuple
        self._refusals = Counter("kvrelay_tenant_refusals", "Requests refused", ["tenant", "cause"], registry=registry)
        self._set_backs = Counter("kvrelay_tenant_set_backs", "Answers set back", ["tenant"], registry=registry)
        self._tokens = Counter("kvrelay_tenant_tokens", "Tokens served", ["tenant", "kind"], registry=registry)
        self._pins = Counter(
            "kvrelay_tenant_pin_tokens", "Tokens of marked prefixes", ["tenant", "outcome"], registry=registry
        )
        self._queue = Histogram(
            "kvrelay_tenant_queue_seconds",
            "Request received to its first plan",
            ["tenant"],
            buckets=_QUEUE_S,
            registry=registry,
        )
        registry.register(self)

    def watch(self, read_accounts: Callable[[], Iterable[Account]]) -> None:
        """Export gauges of the accounts at each scrape."""
        self._read_accounts = read_accounts

    def count_refusal(self, tenant: str, cause: RefusalCause) -> None:
        """Count a request that was refused."""
        key = self._label(tenant), cause.value
        self._refusals.labels(*key).inc()
        self._num_refused[key] += 1

    @property
    def refusals(self) -> tuple[tuple[str, str, int], ...]:
        """Tenant, cause and number of the refused requests."""
        return tuple((*key, count) for key, count in sorted(self._num_refused.items()))

    def count_set_back(self, tenant: str) -> None:
        """Count an answer that gave its room to another tenant's request."""
        self._set_backs.labels(self._label(tenant)).inc()

    def count_service(self, tenant: str, service: Service) -> None:
        """Count the tokens that a request got."""
        label = self._label(tenant)
        self._tokens.labels(label, "prompt_computed").inc(service.num_prompt_tokens - service.num_cached_tokens)
        self._tokens.labels(label, "prompt_cached").inc(service.num_cached_tokens)
        self._tokens.labels(label, "output").inc(service.num_output_tokens)
        self._pins.labels(label, "pinned").inc(service.num_pinned_tokens)
        self._pins.labels(label, "refused").inc(service.num_refused_pin_tokens)

    def observe_queue(self, tenant: str, seconds: float) -> None:
        """Observe the time that a request waited for its first plan."""
        self._queue.labels(self._label(tenant)).observe(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the current gauges, for a scrape."""
        queued = GaugeMetricFamily("kvrelay_tenant_requests_queued", "Requests without a plan", labels=["tenant"])
        active = GaugeMetricFamily("kvrelay_tenant_requests_active", "Requests with a plan", labels=["tenant"])
        counts: dict[str, tuple[int, int]] = {}
        for account in self._read_accounts():
            label = self._label(account.tenant.name)
            num_queued, num_active = counts.get(label, (0, 0))
            counts[label] = (num_queued + account.num_queued, num_active + account.num_active)
        for label, (num_queued, num_active) in counts.items():
            queued.add_metric([label], num_queued)
            active.add_metric([label], num_active)
        yield queued
        yield active

    def _label(self, tenant: str) -> str:
        return self._labels.setdefault(tenant, tenant if len(self._labels) < MAX_LABELS else OTHERS)
