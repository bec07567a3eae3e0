"""Prometheus metrics of a worker, read from its runtime at scrape time and defined in docs/metrics.md."""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.walls import wall_shares
from common.wire_names import ROLE_NAMES, TRANSPORT_NAMES
from worker.prefix_pull import PullOutcome
from worker.recent_steps import WINDOWS_S
from worker.runtime import WorkerRuntime
from worker.worker_tiers import WorkerTiers


class RuntimeCollector(Collector):
    """Reads a runtime's counters, by single attributes: it runs on the metrics server's thread."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        runtime, load = self._runtime, self._runtime.load
        labels = [runtime.worker_id, ROLE_NAMES[runtime.role]]
        gauges: dict[str, tuple[str, float]] = {
            "kvrelay_kv_blocks_used": ("KV blocks held by sequences, reservations or leases", load.num_used_blocks),
            "kvrelay_kv_blocks_cached": ("Free KV blocks that hold reusable KV", load.num_cached_blocks),
            "kvrelay_kv_blocks": ("KV blocks in all", load.num_blocks),
            "kvrelay_pinned_blocks": ("KV blocks that tenants' marks have pinned", load.num_pinned_blocks),
            "kvrelay_window_pages": ("Pages of layers with a window, or of states", load.num_window_pages),
            "kvrelay_window_pages_promised": ("Those promised to sequences", load.num_promised_window_pages),
            "kvrelay_tier_blocks": ("Blocks in tiers", load.num_tier_blocks),
            "kvrelay_tier_blocks_max": ("The most blocks that tiers hold", load.max_tier_blocks),
            "kvrelay_sequences_running": ("Sequences in the running batch", load.num_running),
            "kvrelay_sequences_waiting": ("Sequences waiting", load.num_waiting),
            "kvrelay_reservations": ("Reservations that a transfer fills", load.num_reserved),
            "kvrelay_ranks": ("Processes that share a worker's weights and heads", runtime.num_ranks),
            "kvrelay_leases": ("Handoffs expected or pinned", runtime.handoffs.num_leases),
        }
        counters: dict[str, tuple[str, float]] = {
            "kvrelay_preemptions": ("Sequences that lost their pages", load.num_preemptions),
            "kvrelay_pinned_blocks_evicted": ("Pinned KV blocks that were evicted", load.num_evicted_pins),
            "kvrelay_leases_expired": ("Handoffs ended by expiry", runtime.handoffs.num_expired),
            "kvrelay_worker_requests": ("Calls served", runtime.calls.num_requests),
            "kvrelay_worker_cancels": ("Calls cancelled", runtime.calls.num_cancelled),
            "kvrelay_prompt_tokens_cached": ("Prompt tokens found in the cache", load.num_cached_tokens),
            "kvrelay_prompt_tokens_computed": ("Prompt tokens computed", load.num_computed_tokens),
            "kvrelay_engine_busy_seconds": ("Time in engine steps", runtime.timing.busy_s),
        }
        for make, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in families.items():
                family = make(name, text, labels=["worker", "role"])
                family.add_metric(labels, value)
                yield family
        floors = CounterMetricFamily(
            "kvrelay_engine_floor_seconds", "Least time for the engine's steps", labels=["worker", "role", "bound"]
        )
        floors.add_metric([*labels, "memory"], runtime.recent_steps.memory_s)
        floors.add_metric([*labels, "compute"], runtime.recent_steps.compute_s)
        floors.add_metric([*labels, "link"], runtime.recent_steps.link_s)
        yield floors
        yield self._walls(labels)
        links = GaugeMetricFamily(
            "kvrelay_link_bytes_per_second",
            "KV that a transport moves between pages of this host, as measured at the start",
            labels=["worker", "role", "transport"],
        )
        for number, rate in runtime.link_rates.items():
            links.add_metric([*labels, TRANSPORT_NAMES[number]], rate)
        yield links
        kv_bytes = CounterMetricFamily(
            "kvrelay_kv_transfer_bytes", "KV bytes moved", labels=["worker", "role", "transport", "direction"]
        )
        for direction, totals in (("sent", runtime.bytes_sent), ("received", runtime.bytes_received)):
            for number, name in TRANSPORT_NAMES.items():
                kv_bytes.add_metric([*labels, name, direction], totals[number])
        yield kv_bytes
        drafts = {
            "kvrelay_draft_tokens": ("Draft tokens verified", [counts.num_drafted for counts in load.drafts]),
            "kvrelay_draft_tokens_accepted": ("Draft tokens accepted", [counts.num_accepted for counts in load.drafts]),
        }
        for name, (text, numbers) in drafts.items():
            family = CounterMetricFamily(name, text, labels=["worker", "role", "position"])
            for position, number in enumerate(numbers, 1):
                family.add_metric([*labels, str(position)], number)
            yield family
        pulls = CounterMetricFamily(
            "kvrelay_prefix_pulls", "Pulls of cached blocks ended", labels=["worker", "role", "outcome"]
        )
        for outcome in PullOutcome:
            pulls.add_metric([*labels, outcome.value], runtime.prefixes.outcomes[outcome])
        yield pulls
        if runtime.tiers is not None:
            yield from self._tiers(runtime.tiers, labels)

    def _tiers(self, tiers: WorkerTiers, labels: list[str]) -> Iterator[Metric]:
        reads = CounterMetricFamily(
            "kvrelay_tier_reads", "Reads of a prompt's blocks from tiers", labels=["worker", "role", "outcome"]
        )
        for outcome in PullOutcome:
            reads.add_metric([*labels, outcome.value], self._runtime.prefixes.tier_outcomes[outcome])
        reads.add_metric([*labels, "skipped"], tiers.num_skipped)
        yield reads
        served = CounterMetricFamily(
            "kvrelay_tier_served_blocks", "Blocks read from tiers for other workers", labels=["worker", "role"]
        )
        served.add_metric(labels, tiers.serving.num_served)
        yield served
        read_ahead = self._runtime.read_ahead
        ahead = CounterMetricFamily(
            "kvrelay_tier_reads_ahead", "Reads for requests that had not come", labels=["worker", "role", "outcome"]
        )
        for outcome in PullOutcome:
            ahead.add_metric([*labels, outcome.value], read_ahead.outcomes[outcome])
        yield ahead
        blocks_ahead = CounterMetricFamily(
            "kvrelay_tier_blocks_ahead", "Blocks that were read ahead, by their use", labels=["worker", "role", "use"]
        )
        blocks_ahead.add_metric([*labels, "used"], read_ahead.blocks.num_used)
        blocks_ahead.add_metric([*labels, "wasted"], read_ahead.blocks.num_wasted)
        yield blocks_ahead
        missed = CounterMetricFamily(
            "kvrelay_tier_missed", "Blocks that left their page before they were copied", labels=["worker", "role"]
        )
        missed.add_metric(labels, tiers.writes.num_missed)
        yield missed
        alarms = GaugeMetricFamily(
            "kvrelay_tier_alarms", "What is wrong with tiers now, as a number of alarms", labels=["worker", "role"]
        )
        alarms.add_metric(labels, len(tiers.writes.stats.alarms))
        yield alarms
        blocks = CounterMetricFamily(
            "kvrelay_tier_events", "What happened to blocks of a tier", labels=["worker", "role", "tier", "event"]
        )
        for name, counts in tiers.tiers.stats().tiers.items():
            events = {
                "hit": counts.hits,
                "miss": counts.misses,
                "write": counts.writes,
                "eviction": counts.evictions,
            }
            for event, count in (events | dict(counts.dropped)).items():
                blocks.add_metric([*labels, name, event], count)
        yield blocks

    def _walls(self, labels: list[str]) -> Metric:
        covered_s, totals = self._runtime.recent_steps.over(WINDOWS_S[0])
        family = GaugeMetricFamily(
            "kvrelay_wall_share", "Share of the last minute that this part takes", labels=["worker", "role", "wall"]
        )
        for wall, share in wall_shares(partial(getattr, totals), covered_s).parts.items():
            family.add_metric([*labels, wall], share)
        return family


def registry_of(runtime: WorkerRuntime) -> CollectorRegistry:
    """Return a registry with a runtime's metrics."""
    registry = CollectorRegistry()
    registry.register(RuntimeCollector(runtime))
    return registry
