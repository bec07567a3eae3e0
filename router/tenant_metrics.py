"""Prometheus metrics by tenant. Labels are bounded: tenants beyond the first hundred share one label."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.errors import RefusalCause
from router.admission.account import Account, Service

MAX_LABELS = 100
OTHERS = "others"
_QUEUE_S = (0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0)


class TenantMetrics(Collector):
    """Counters and gauges of tenants. Event loop only; a scrape reads from another thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: dict[str, str] = {}
        self._read_accounts: Callable[[], Iterable[Account]] = tuple
        self._refusals = Counter("kvrelay_tenant_refusals", "Requests refused", ["tenant", "cause"], registry=registry)
        self._tokens = Counter("kvrelay_tenant_tokens", "Tokens served", ["tenant", "kind"], registry=registry)
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
        self._refusals.labels(self._label(tenant), cause.value).inc()

    def count_service(self, tenant: str, service: Service) -> None:
        """Count the tokens that a request got."""
        label = self._label(tenant)
        self._tokens.labels(label, "prompt_computed").inc(service.num_prompt_tokens - service.num_cached_tokens)
        self._tokens.labels(label, "prompt_cached").inc(service.num_cached_tokens)
        self._tokens.labels(label, "output").inc(service.num_output_tokens)

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
