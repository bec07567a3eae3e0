"""The page of one load test: its top, with headline figures beside their objectives, and its sections."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from measure.load.estimates import Estimate, MeasuredDistribution
from measure.load.records import Run
from measure.load.report import asked, gantt, handoff, latency, pools
from measure.load.report.columns import columns_of
from measure.load.summary import KindSummary, Summary
from measure.load.tables import UNKNOWN, Writer, objectives, quoted
from measure.pages.page import Card, Page, PageSection, Panel, Tone, table_of, write_page
from measure.pages.wording import count, duration, number, percent, scaled


def cards(summary: Summary) -> tuple[Card, ...]:
    """Return the headline figures; those that the target does not report are left out."""
    overall, slo = summary.overall, summary.slo
    latencies, cache = overall.latencies, overall.cache
    shown = [
        Card(
            label="Goodput, requests",
            value=f"{number(overall.goodput_per_s.value)}/s",
            note=f"{_interval(overall.goodput_per_s, number)}; offered {number(summary.throughput.offered_per_s)}/s",
        ),
        Card(
            label="Within both objectives",
            value=percent(overall.good_share.value),
            note=f"{_interval(overall.good_share, percent)}; of {count(overall.num_requests, 'request')}",
        ),
        *_latency_cards("TTFT", latencies.ttft, slo.ttft_s),
        *_latency_cards("TPOT", latencies.tpot, slo.tpot_s),
        *_latency_cards("ITL", latencies.itl, None),
        *_latency_cards("E2E", latencies.e2e, None),
        Card(
            label="Throughput",
            value=f"{scaled(summary.throughput.output_tokens_per_s)} tokens/s",
            note=f"{scaled(summary.throughput.prompt_tokens_per_s)} prompt tokens/s{_per_worker(summary)}",
        ),
    ]
    if cache is not None:
        shown.append(
            Card(
                label="Cache hit",
                value=percent(cache.hit_share.value),
                note=f"of prompt tokens; {percent(cache.pulled_share)} pulled from other workers",
            )
        )
    if latencies.transfer_exposed is not None:
        exposed = latencies.transfer_exposed
        shown.append(
            Card(
                label="Exposed transfer: p50 / p99",
                value=_both(exposed),
                note=f"{count(overall.num_transfers, 'transfer')}; the part that prefill did not hide",
            )
        )
    return (*shown, _failures_card(overall), _generator_card(summary))


def kinds_panel(summary: Summary) -> Panel:
    """Return the table of kinds."""
    columns: dict[str, Callable[[KindSummary], str]] = {
        "kind": lambda kind: kind.kind,
        "requests": lambda kind: f"{kind.num_requests:,}",
        "good": lambda kind: percent(kind.good_share.value),
        "not complete": lambda kind: f"{kind.num_not_complete:,}",
        "late first token": lambda kind: f"{kind.num_ttft_misses:,}",
        "slow tokens": lambda kind: f"{kind.num_tpot_misses:,}",
        "TTFT p50 / p99": lambda kind: _both(kind.latencies.ttft),
        "TPOT p50 / p99": lambda kind: _both(kind.latencies.tpot),
        "ITL p50 / p99": lambda kind: _both(kind.latencies.itl),
        "E2E p50 / p99": lambda kind: _both(kind.latencies.e2e),
        "cache hit": lambda kind: UNKNOWN if kind.cache is None else percent(kind.cache.hit_share.value),
    }
    return Panel(
        title="What each kind of session got",
        look_for="A kind whose p99 is far from its p50 pays for other kinds.",
        content=table_of(summary.distinct_kinds, columns, strong_rows=frozenset([0])),
        note=f"Counted: {summary.window.rule}. Latencies are of complete requests, from when they were due."
        " A percentile marked ~ rests on too few requests.",
    )


def _interval(estimate: Estimate, write: Writer) -> str:
    return f"95 %: {write(estimate.low)} to {write(estimate.high)}"


def _latency_cards(name: str, times: MeasuredDistribution | None, objective_s: float | None) -> Iterable[Card]:
    if times is None:
        return
    p99 = times.at(0.99)
    objective = "" if objective_s is None else f"; objective {duration(objective_s)}"
    tone = Tone.PLAIN if objective_s is None else Tone.GOOD if p99.value <= objective_s else Tone.BAD
    yield Card(
        label=f"{name}: p50 / p99",
        value=_both(times),
        note=f"p99, {_interval(p99.estimate, duration)}{objective}",
        tone=tone,
    )


def _per_worker(summary: Summary) -> str:
    num_workers = sum(summary.info.num_workers.values())
    return f"; {scaled(summary.throughput.output_tokens_per_s / num_workers)} per worker" if num_workers > 1 else ""


def _failures_card(overall: KindSummary) -> Card:
    parts = (
        (overall.num_refused, "refused"),
        (overall.num_failed, "failed"),
        (overall.num_timed_out, "timed out"),
        (overall.num_cancelled, "cancelled"),
    )
    return Card(
        label="Not complete",
        value=count(overall.num_not_complete, "request"),
        note=", ".join(f"{number} {word}" for number, word in parts if number) or "every answer is complete",
        tone=Tone.BAD if overall.num_not_complete else Tone.GOOD,
    )


def _generator_card(summary: Summary) -> Card:
    generator = summary.info.generator
    return Card(
        label="Delay of the generator, p99",
        value=duration(generator.lag_p99_s),
        note=f"{count(generator.num_processes, 'process', 'processes')}, {percent(generator.cpu_share, 0)} of a core",
        tone=Tone.BAD if generator.warnings else Tone.GOOD,
    )


def _both(times: MeasuredDistribution | None) -> str:
    return UNKNOWN if times is None else f"{quoted(times.at(0.5))} / {quoted(times.at(0.99))}"


def write_report(run: Run, summary: Summary, path: Path) -> None:
    """Write the page of a run. Equal runs give equal bytes. Raises OSError."""
    write_page(path, report_page(run, summary))


def report_page(run: Run, summary: Summary) -> Page:
    """Return the page of a run. Panels without data give the reason."""
    columns = columns_of(run, summary.window)
    workers = pools.series_of(run.samples)
    return Page(
        title=run.info.name,
        subtitle=_subtitle(run),
        warnings=tuple(dict.fromkeys((*summary.warnings, *run.info.generator.warnings))),
        cards=cards(summary),
        sections=(
            PageSection(title="Overview", panels=(kinds_panel(summary), asked.failures_panel(summary))),
            PageSection(
                title="Latency",
                intro="From the due time of a request, so that a late generator hides no wait.",
                panels=(
                    *latency.distribution_panels(columns, summary.slo),
                    latency.prompt_length_panel(columns, summary.slo),
                ),
            ),
            PageSection(
                title="Over time",
                panels=latency.over_time_panels(columns, summary.slo, summary.window, run.samples),
            ),
            PageSection(title="Requests", panels=(gantt.gantt_panel(columns, summary.slo),)),
            PageSection(title="Handoff", panels=handoff.handoff_panels(columns)),
            PageSection(title="Pools", panels=pools.pool_panels(workers, summary)),
            PageSection(title="Caches", panels=asked.cache_panels(columns)),
            PageSection(title="Requests sent", panels=asked.asked_panels(columns)),
        ),
        settings=asdict(run.info),
    )


def _subtitle(run: Run) -> str:
    info = run.info
    workers = ", ".join(f"{number} {role}" for role, number in info.num_workers.items())
    labels = ", ".join(f"{name} {value}" for name, value in info.labels.items())
    parts = (
        f"{info.system} serving {info.model}",
        info.target,
        workers,
        labels,
        "" if info.told_slo is None else f"told the server: {objectives(info.told_slo)}",
        f"{count(len(run.requests), 'request')} in {duration(info.duration_s)}",
        info.started_at,
    )
    return " · ".join(part for part in parts if part)
