"""The Grafana dashboards, declared as panels of queries; `python -m deploy.observability.dashboards` writes the JSON.

Every metric is defined in docs/metrics.md. tests/e2e/test_dashboards.py compares each name and label with what a
running cluster exports, and the JSON with this declaration.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram."""

    title: str
    unit: str
    """Grafana's name of the unit: s, reqps, percentunit, Bps, short."""
    queries: tuple[Query, ...]
    about: str = ""
    """Says what to look for."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    name: str
    panels: tuple[Panel, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the document that Grafana loads."""
        source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source"}
        return {
            "uid": f"kvrelay-{self.name}",
            "title": f"kvrelay: {self.name}",
            "tags": ["kvrelay"],
            "schemaVersion": 39,
            "editable": False,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [source]},
            "links": [{"type": "dashboards", "tags": ["kvrelay"], "title": "kvrelay", "asDropdown": True}],
            "panels": [_panel_json(panel, number) for number, panel in enumerate(self.panels)],
        }


def _panel_json(panel: Panel, number: int) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": {"axisSoftMin": 0, "fillOpacity": 10, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the summed rate of a counter, by some labels."""
    grouping = f" by ({by})" if by else ""
    selector = f"{{{where}}}" if where else ""
    return f"sum{grouping} (rate({metric}{selector}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "") -> tuple[Query, ...]:
    """Return the median and the 99th percentile of a histogram, by a further label."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f" {{{{{by}}}}}")
    inner = rate(f"{histogram}_bucket", labels)
    return tuple(Query(f"histogram_quantile({q}, {inner})", f"p{round(q * 100)}{legend}") for q in (0.5, 0.99))


def share(part: str, *others: str) -> str:
    """Return the share of one expression in its sum with others."""
    return f"{part} / ({' + '.join((part, *others))})"


def _each(metric: str, by: str, where: str = "") -> tuple[Query, ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return (Query(rate(metric, by, where), legend),)


_FLEET = Dashboard(
    "fleet",
    (
        Panel("Requests by outcome", "reqps", _each("kvrelay_requests_total", "outcome")),
        Panel("Time to first token", "s", quantiles("kvrelay_ttft_seconds")),
        Panel("Gap between tokens", "s", quantiles("kvrelay_itl_seconds")),
        Panel("Receipt to last token", "s", quantiles("kvrelay_e2e_seconds")),
        Panel(
            "Where the time to first token goes: medians",
            "s",
            tuple(
                Query(f"histogram_quantile(0.5, {rate(f'kvrelay_{part}_seconds_bucket', 'le')})", part)
                for part in ("queue", "prefill", "transfer")
            ),
            "A long queue: prefill capacity. A long prefill: long prompts or cache misses. A transfer overlaps both.",
        ),
        Panel(
            "Requests in the router",
            "short",
            (
                Query("sum(kvrelay_requests_queued)", "queued"),
                Query("sum(kvrelay_requests_active)", "with a plan"),
                Query("sum(kvrelay_bookings)", "bookings"),
            ),
        ),
        Panel("Workers in use", "short", (Query("min(kvrelay_workers_ready)", "as the router that sees fewest"),)),
        Panel(
            "Recovery",
            "reqps",
            (
                *_each("kvrelay_replans_total", "reason"),
                Query(rate("kvrelay_worker_refusals_total", "role"), "refused by {{role}}"),
            ),
            "Plans made again after a failure, and requests that a full worker sent back to the line.",
        ),
        Panel("Lateness of routers' event loops", "s", quantiles("kvrelay_event_loop_lag_seconds", "instance")),
        Panel("Alarms of the routers", "short", (Query("max by (kind) (kvrelay_routing_alarm)", "{{kind}}"),)),
        Panel("HTTP responses", "reqps", _each("kvrelay_http_responses_total", "path, status")),
        Panel("HTTP connections", "short", (Query("sum(kvrelay_http_connections)", "open"),)),
    ),
)

_POOL = Dashboard(
    "pool",
    (
        Panel(
            "Time in engine steps",
            "percentunit",
            (Query("rate(kvrelay_engine_busy_seconds_total[$__rate_interval])", "{{worker}}"),),
            "Near 1 the worker computes all the time. One far above its pool: skewed placement, or a slow host.",
        ),
        Panel(
            "Least time for the steps, as a share of the window",
            "percentunit",
            (Query("rate(kvrelay_engine_floor_seconds_total[$__rate_interval])", "{{worker}} {{bound}}"),),
            "Near the time in steps, memory or arithmetic is the wall; far below it, neither is. See `kvrelay why`.",
        ),
        Panel(
            "Sequences running",
            "short",
            (Query("sum by (worker, role) (kvrelay_sequences_running)", "{{worker}}"),),
        ),
        Panel(
            "Sequences waiting",
            "short",
            (Query("sum by (worker, role) (kvrelay_sequences_waiting)", "{{worker}}"),),
        ),
        Panel(
            "Pages held",
            "percentunit",
            (Query("kvrelay_kv_blocks_used / kvrelay_kv_blocks", "{{worker}}"),),
            "At 1 new answers wait, and running ones are preempted.",
        ),
        Panel("Preemptions", "ops", _each("kvrelay_preemptions_total", "worker")),
        Panel("Prompt tokens computed", "short", _each("kvrelay_prompt_tokens_computed_total", "worker")),
        Panel("Calls served", "reqps", _each("kvrelay_worker_requests_total", "worker")),
        Panel("Calls cancelled", "reqps", _each("kvrelay_worker_cancels_total", "worker")),
        Panel(
            "Share of a pool's time in engine steps",
            "percentunit",
            (Query("role:kvrelay_engine_busy:ratio_rate5m", "{{role}}"),),
            "Pools far apart: another split would carry more; `kvrelay plan` says which.",
        ),
    ),
)

_TENANT = Dashboard(
    "tenant",
    (
        Panel("Tokens served", "short", _each("kvrelay_tenant_tokens_total", "tenant, kind")),
        Panel("Requests queued", "short", (Query("sum by (tenant) (kvrelay_tenant_requests_queued)", "{{tenant}}"),)),
        Panel(
            "Requests with a plan", "short", (Query("sum by (tenant) (kvrelay_tenant_requests_active)", "{{tenant}}"),)
        ),
        Panel("Wait for the first plan", "s", quantiles("kvrelay_tenant_queue_seconds", "tenant")),
        Panel("Refusals", "reqps", _each("kvrelay_tenant_refusals_total", "tenant, cause")),
        Panel(
            "Cached share of prompts",
            "percentunit",
            (
                Query(
                    rate("kvrelay_tenant_tokens_total", "tenant", 'kind="prompt_cached"')
                    + " / "
                    + rate("kvrelay_tenant_tokens_total", "tenant", 'kind=~"prompt_cached|prompt_computed"'),
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)

_CACHE = Dashboard(
    "cache",
    (
        Panel(
            "Prompt tokens found in the cache",
            "percentunit",
            (
                Query(
                    share(
                        rate("kvrelay_prompt_tokens_cached_total", "worker"),
                        rate("kvrelay_prompt_tokens_computed_total", "worker"),
                    ),
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Found / predicted",
            "percentunit",
            (
                Query(
                    f"{rate('kvrelay_actual_cached_tokens_total')} / {rate('kvrelay_predicted_cached_tokens_total')}",
                    "tokens",
                ),
            ),
            "Far below 1 the prefix index is stale, or prefixes leave the caches before they are used.",
        ),
        Panel(
            "Pages",
            "short",
            (
                Query("sum by (role) (kvrelay_kv_blocks_used)", "held, {{role}}"),
                Query("sum by (role) (kvrelay_kv_blocks_cached)", "cached and free, {{role}}"),
                Query("sum by (role) (kvrelay_kv_blocks)", "all, {{role}}"),
            ),
        ),
        Panel("Pulls of cached blocks", "ops", _each("kvrelay_prefix_pulls_total", "outcome")),
        Panel(
            "Blocks in the prefix index",
            "short",
            (
                Query("max(kvrelay_index_blocks)", "known"),
                Query("max(kvrelay_index_evicted_blocks)", "forgotten since start"),
            ),
            "Blocks are forgotten beyond router.index_memory_mib: then raise it.",
        ),
    ),
)

_TRANSFER = Dashboard(
    "transfer",
    (
        Panel(
            "KV bytes received",
            "Bps",
            _each("kvrelay_kv_transfer_bytes_total", "worker, transport", 'direction="received"'),
        ),
        Panel(
            "KV bytes sent", "Bps", _each("kvrelay_kv_transfer_bytes_total", "worker, transport", 'direction="sent"')
        ),
        Panel("First to last block received", "s", quantiles("kvrelay_transfer_seconds")),
        Panel("Handoffs expected or pinned", "short", (Query("sum by (worker) (kvrelay_leases)", "{{worker}}"),)),
        Panel(
            "Handoffs ended by expiry",
            "ops",
            _each("kvrelay_leases_expired_total", "worker"),
            "Each one means a crash or a defect.",
        ),
        Panel("Reservations", "short", (Query("sum by (worker) (kvrelay_reservations)", "{{worker}}"),)),
    ),
)

_PLANNER = Dashboard(
    "planner",
    (
        Panel(
            "Workers present and wanted",
            "short",
            (
                Query("sum by (pool) (kvrelay_pool_workers_present)", "present, {{pool}}"),
                Query("sum by (pool) (kvrelay_pool_workers_wanted)", "wanted, {{pool}}"),
            ),
            "With planner.mode: advise or act, and planner.metrics_port.",
        ),
        Panel("Changes", "ops", _each("kvrelay_planner_changes_total", "outcome")),
        Panel("Predicted / actual time to first token", "short", quantiles("kvrelay_prediction_ttft_ratio")),
        Panel("Predicted / actual gap between tokens", "short", quantiles("kvrelay_prediction_tpot_ratio")),
        Panel(
            "Error of predicted cached tokens",
            "percentunit",
            quantiles("kvrelay_prediction_cached_tokens_error"),
            "(predicted - found) / tokens of the prompt.",
        ),
    ),
)

DASHBOARDS: Sequence[Dashboard] = (_FLEET, _POOL, _TENANT, _CACHE, _TRANSFER, _PLANNER)


def documents() -> Iterator[tuple[Path, str]]:
    """Yield the file of each dashboard and its content."""
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.name}.json", json.dumps(dashboard.as_json(), indent=1) + "\n"


if __name__ == "__main__":
    for path, text in documents():
        path.write_text(text, encoding="utf-8")
