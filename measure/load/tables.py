"""A summary as tables for a terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.slo import Slo
from measure.load.estimates import PERCENTILES, Estimate, MeasuredDistribution, Percentile
from measure.load.summary import KindSummary, Latencies, Summary, WorkerSummary
from measure.pages.wording import count, duration, number, percent, scaled

Writer = Callable[[float], str]
_T = TypeVar("_T")

UNKNOWN = "–"
UNSURE = "~"
_GOOD, _BAD, _NEITHER = "bold green", "bold red", "bold yellow"
_USERS = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
_STAGES = (
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("transfer", "transfer"),
    ("  exposed", "transfer_exposed"),
)


def summary_view(summary: Summary, *, required_share: float) -> RenderableType:
    """Return the tables of a summary; the objectives are met when `required_share` of the requests are good."""
    parts: list[RenderableType | None] = [
        _title(summary),
        _headline(summary, required_share),
        _shares(summary),
        _latency_table(summary),
        _footnote(summary),
        _work(summary),
        _pool_table(summary.pools) if summary.pools else None,
        _failure_table(summary) if summary.failures else None,
        _generator(summary),
        *(Text(f"! {warning}", style=_NEITHER) for warning in summary.warnings),
    ]
    return Group(*(part for part in parts if part is not None))


def objectives(slo: Slo) -> str:
    """Return the objectives in words."""
    return (
        f"TTFT ≤ {duration(slo.ttft_s)} (longer above {slo.ttft_tokens:,} prompt tokens), TPOT ≤ {duration(slo.tpot_s)}"
    )


def between(estimate: Estimate, write: Writer = duration) -> str:
    """Return the interval of an estimate."""
    return f"{write(estimate.low)} – {write(estimate.high)}"


def quoted(percentile: Percentile) -> str:
    """Return a percentile of a time, marked where too few requests lie beyond it."""
    return f"{'' if percentile.is_sufficient else UNSURE}{duration(percentile.value)}"


def or_unknown(value: float | None, write: Writer) -> str:
    """Return a value in words, or the mark for values that the target does not report."""
    return UNKNOWN if value is None else write(value)


def plain_table(*columns: str, num_left: int = 1) -> Table:
    """Return a table without lines: the first columns are text, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_left else "right", no_wrap=True)
    return table


def filled_table(items: Iterable[_T], columns: Mapping[str, Callable[[_T], str]]) -> Table:
    """Return a table with a row for each item, whose cells the columns write."""
    table = plain_table(*columns)
    for item in items:
        table.add_row(*(write(item) for write in columns.values()))
    return table


def verdict_style(estimate: Estimate, required: float) -> str:
    """Return green for a share that reaches `required`, red for one that certainly does not, else yellow."""
    if estimate.value >= required:
        return _GOOD
    return _BAD if estimate.high < required else _NEITHER


def _title(summary: Summary) -> Text:
    info, window = summary.info, summary.window
    workers = " + ".join(f"{number_of} {role}" for role, number_of in info.num_workers.items() if number_of)
    left_out = [
        f"{number_of} {what}"
        for number_of, what in ((window.num_before, "in the warm-up"), (window.num_after, "in the cool-down"))
        if number_of
    ]
    told = "" if info.told_slo is None else f"told the server: {objectives(info.told_slo)}\n"
    return Text.assemble(
        (info.name, "bold"),
        f" · {info.system}{', ' + workers if workers else ''} · {info.model} · {info.target}\n",
        told,
        f"{count(window.num_counted, 'request')}, {window.rule}",
        f"; left out: {', '.join(left_out)}\n" if left_out else "\n",
    )


def _headline(summary: Summary, required_share: float) -> Text:
    overall = summary.overall
    share, rate = overall.good_share, overall.goodput_per_s
    if share.value >= required_share:
        verdict = "SLOs are met"
    else:
        verdict = (
            "SLOs are not met" if share.high < required_share else "SLOs are not met, by less than the uncertainty"
        )
    return Text.assemble(
        (f"{verdict}: ", verdict_style(share, required_share)),
        (f"{percent(share.value)} good", "bold"),
        f" [{between(share, percent)}], {percent(required_share, 0)} wanted\n",
        ("goodput ", ""),
        (f"{number(rate.value)} requests/s", "bold"),
        f" [{between(rate, number)}] of {number(summary.throughput.offered_per_s)} offered"
        f" · {objectives(summary.slo)}\n",
    )


def _shares(summary: Summary) -> RenderableType:
    columns: dict[str, Callable[[KindSummary], str]] = {
        "": lambda kind: kind.kind,
        "requests": lambda kind: f"{kind.num_requests:,}",
        "good": lambda kind: f"{kind.num_good:,} ({percent(kind.good_share.value)})",
        "late TTFT": lambda kind: _some(kind.num_ttft_misses),
        "slow TPOT": lambda kind: _some(kind.num_tpot_misses),
        "refused": lambda kind: _some(kind.num_refused),
        "failed": lambda kind: _some(kind.num_failed),
        "timed out": lambda kind: _some(kind.num_timed_out),
        "cancelled": lambda kind: _some(kind.num_cancelled),
    }
    return _spaced(filled_table(summary.distinct_kinds, columns))


def _some(number_of: int) -> str:
    return f"{number_of:,}" if number_of else UNKNOWN


def _latency_table(summary: Summary) -> RenderableType | None:
    """Return the latencies; None where no request is complete."""
    table = plain_table("", "", *(f"p{100 * p:g}" for p in PERCENTILES), "p99 between", "mean", "max", num_left=2)
    kinds = summary.distinct_kinds
    for kind in kinds:
        for name, distribution in _measured(kind.latencies, _USERS):
            table.add_row(kind.kind if name == "TTFT" else "", name, *_cells(distribution))
        if len(kinds) > 1:
            table.add_section()
    for name, distribution in _measured(summary.overall.latencies, _STAGES):
        table.add_row("server" if name == "queue" else "", name, *_cells(distribution), style="dim")
    return _spaced(table) if table.row_count else None


def _measured(latencies: Latencies, measures: Iterable[tuple[str, str]]) -> Iterator[tuple[str, MeasuredDistribution]]:
    for name, attribute in measures:
        distribution: MeasuredDistribution | None = getattr(latencies, attribute)
        if distribution is not None:
            yield name, distribution


def _cells(distribution: MeasuredDistribution) -> Iterator[str]:
    for p in PERCENTILES:
        yield quoted(distribution.at(p))
    yield between(distribution.at(0.99).estimate)
    yield duration(distribution.mean.value)
    yield duration(distribution.max)


def _footnote(summary: Summary) -> Text | None:
    """Return the meaning of the mark, and the requests that would avoid it; None when no percentile is marked."""
    needed: dict[str, int] = {}
    for kind in summary.distinct_kinds:
        for name, distribution in _measured(kind.latencies, (*_USERS, *_STAGES)):
            for percentile in distribution.percentiles:
                if not percentile.is_sufficient:
                    what = f"p{100 * percentile.p:g}" + (" of ITL" if name == "ITL" else "")
                    needed[what] = max(needed.get(what, 0), percentile.num_needed)
    if not needed:
        return None
    wanted = ", ".join(f"{what} takes {number_of:,}" for what, number_of in sorted(needed.items()))
    return Text(f"{UNSURE} too few requests for this percentile ({wanted} of a kind): a rough figure\n", style="dim")


def _work(summary: Summary) -> Text:
    overall, throughput = summary.overall, summary.throughput
    parts = [
        f"{scaled(throughput.output_tokens_per_s)} output tokens/s",
        f"{scaled(throughput.prompt_tokens_per_s)} prompt tokens/s",
        f"{number(throughput.completed_per_s)} answers/s",
    ]
    if overall.cache is not None:
        pulled = f" ({percent(overall.cache.pulled_share)} pulled)" if overall.cache.pulled_share else ""
        parts.append(f"{percent(overall.cache.hit_share.value)} of prompt tokens cached{pulled}")
    if overall.bytes_per_transfer is not None:
        parts.append(f"{count(overall.num_transfers, 'transfer')} of {scaled(overall.bytes_per_transfer, 'B')}")
    if overall.num_replans:
        parts.append(count(overall.num_replans, "replan"))
    if summary.peak_queued:
        parts.append(f"at most {summary.peak_queued} in line")
    if overall.prediction is not None:
        off = overall.prediction
        parts.append(f"TTFT forecasts off by {duration(off.median_s)} (median), {duration(off.p90_abs_s)} (p90)")
    return Text("work  " + " · ".join(parts) + "\n")


def _pool_table(pools: Iterable[WorkerSummary]) -> RenderableType:
    columns: dict[str, Callable[[WorkerSummary], str]] = {
        "pool": lambda pool: pool.name,
        "workers": lambda pool: str(pool.num_workers),
        "busy": lambda pool: or_unknown(pool.busy, whole_percent),
        "running": lambda pool: or_unknown(pool.mean_running, number),
        "waiting": lambda pool: or_unknown(pool.mean_waiting, number),
        "KV mean": lambda pool: or_unknown(pool.mean_kv, whole_percent),
        "KV peak": lambda pool: or_unknown(pool.peak_kv, whole_percent),
        "computed tok/s": lambda pool: or_unknown(pool.computed_tokens_per_s, scaled),
        "output tok/s": lambda pool: scaled(pool.output_tokens_per_s),
        "a worker": lambda pool: scaled(pool.output_tokens_per_worker_s),
    }
    return _spaced(filled_table(pools, columns))


def _failure_table(summary: Summary) -> RenderableType:
    table = plain_table("outcome", "requests", "why", num_left=1)
    table.columns[2].justify = "left"
    table.columns[2].no_wrap = False
    for failure in summary.failures:
        table.add_row(failure.outcome.replace("_", " "), f"{failure.num_requests:,}", Text(failure.error or UNKNOWN))
    return _spaced(table)


def _generator(summary: Summary) -> Text:
    generator = summary.info.generator
    processes = count(generator.num_processes, "process", "processes")
    facts = (
        f"generator  {processes}, {percent(generator.cpu_share, 0)} of a core at most; sent late by"
        f" {duration(generator.lag_p99_s)} (p99), {duration(generator.lag_max_s)} (max);"
        f" noticed late by {duration(generator.loop_lag_p99_s)} (p99)"
    )
    return Text(facts + ("" if generator.warnings else ": it kept up"), style="dim")


def whole_percent(share: float) -> str:
    """Return a share as percent without decimals."""
    return percent(share, 0)


def _spaced(table: Table) -> RenderableType:
    return Group(table, "")
