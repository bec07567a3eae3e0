"""A summary in figures and tables, which pages show and terminals print."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text

from common.slo import Slo
from measure.load.estimates import PERCENTILES, Estimate, MeasuredDistribution, Percentile
from measure.load.summary import KindSummary, Summary, WorkerSummary
from measure.pages.page import Card, Table, Tone, table_of
from measure.pages.wording import count, duration, number, percent, scaled

Writer = Callable[[float], str]
_T = TypeVar("_T")

UNKNOWN = "–"
UNSURE = "~"
CAUTION = "bold yellow"
_STYLES = {Tone.GOOD: "bold green", Tone.BAD: "bold red", Tone.PLAIN: "bold"}
_LONG = 60
"""Width of cells above which a column of a terminal breaks lines."""
_USERS = {"TTFT": "ttft", "ITL": "itl", "TPOT": "tpot", "E2E": "e2e"}
_STAGES = {"queue": "queue", "prefill": "prefill", "transfer": "transfer", "exposed": "transfer_exposed"}


def summary_view(summary: Summary, *, required_share: float) -> RenderableType:
    """Return a summary for a terminal; the objectives are met when `required_share` of the requests are good."""
    tables = [share_table(summary), latency_table(summary), failure_table(summary)]
    if summary.pools:
        tables.insert(2, worker_table(summary.pools, ()))
    parts: list[RenderableType] = [_title(summary), _verdict(summary, required_share)]
    parts += [_card_grid([*served_cards(summary), *session_cards(summary), *_work_cards(summary)]), ""]
    for table in tables:
        if table.rows:
            parts += [terminal_table(table), ""]
    if needed := _needed(summary):
        parts.append(Text(f"{UNSURE} too few requests for this percentile ({needed} of a kind): a rough figure"))
    parts += [Text(f"! {warning}", style=CAUTION) for warning in summary.warnings]
    return Group(*parts)


def all_cards(summary: Summary) -> Iterator[Card]:
    """Yield the headline figures; those that the target does not report are left out."""
    yield from served_cards(summary)
    yield from session_cards(summary)
    latencies, slo = summary.overall.latencies, summary.slo
    for name, times, objective_s in (
        ("TTFT", latencies.ttft, slo.ttft_s),
        ("TPOT", latencies.tpot, slo.tpot_s),
        ("ITL", latencies.itl, None),
        ("E2E", latencies.e2e, None),
    ):
        if times is not None:
            p99 = times.at(0.99)
            objective = "" if objective_s is None else f"; objective {duration(objective_s)}"
            tone = Tone.PLAIN if objective_s is None else Tone.GOOD if p99.value <= objective_s else Tone.BAD
            note = f"p99, {between(p99.estimate)}{objective}"
            yield Card(label=f"{name}: p50 / p99", value=_both(times), note=note, tone=tone)
    yield from _work_cards(summary)


def session_cards(summary: Summary) -> Iterator[Card]:
    """Yield how whole sessions went; nothing where requests are sessions of their own."""
    sessions = summary.sessions
    if sessions is None:
        return
    good = "" if sessions.good_per_hour is None else f"; {number(sessions.good_per_hour)} good ones per hour"
    ended = f"{sessions.num_complete:,} of {sessions.num_sessions:,}"
    yield Card(label="Sessions complete", value=ended, note=f"{number(sessions.complete_per_hour)} per hour{good}")
    if sessions.interactivity_p90 is not None and sessions.interactivity_p50 is not None:
        value = f"{number(sessions.interactivity_p50)} / {number(sessions.interactivity_p90)}"
        yield Card(label="Interactivity: p50 / P90", value=value, note="tokens/s that so many sessions reach")
    if sessions.waiting is not None:
        value = f"{duration(sessions.waiting.p50)} / {duration(sessions.waiting.p90)}"
        yield Card(label="Waiting of sessions: p50 / p90", value=value, note="without tools and persons")
    if sessions.stretch is not None:
        value = f"{number(sessions.stretch.p50)} / {number(sessions.stretch.p90)}"
        yield Card(label="Stretch: p50 / p90", value=value, note=f"good up to {sessions.stretch_limit:g}")


def served_cards(summary: Summary) -> Iterator[Card]:
    """Yield how many requests were served as promised."""
    overall, throughput = summary.overall, summary.throughput
    yield Card(
        label="Goodput, requests",
        value=f"{number(overall.goodput_per_s.value)}/s",
        note=f"{between(overall.goodput_per_s, number)}; offered {number(throughput.offered_per_s)}/s",
    )
    yield Card(
        label="Within both objectives",
        value=percent(overall.good_share.value),
        note=f"{between(overall.good_share, percent)}; of {count(overall.num_requests, 'request')}"
        f"; {objectives(summary.slo)}",
    )
    parts = {
        "refused": overall.num_refused,
        "failed": overall.num_failed,
        "timed out": overall.num_timed_out,
        "cancelled": overall.num_cancelled,
    }
    yield Card(
        label="Not complete",
        value=count(overall.num_not_complete, "request"),
        note=", ".join(f"{num} {word}" for word, num in parts.items() if num) or "every answer is complete",
        tone=Tone.BAD if overall.num_not_complete else Tone.GOOD,
    )


def _work_cards(summary: Summary) -> Iterator[Card]:
    """Yield what the server and the generator did for it."""
    overall, throughput, generator = summary.overall, summary.throughput, summary.info.generator
    num_workers = sum(summary.info.num_workers.values())
    a_worker = f"; {scaled(throughput.output_tokens_per_s / num_workers)} per worker" if num_workers > 1 else ""
    yield Card(
        label="Throughput",
        value=f"{scaled(throughput.output_tokens_per_s)} tokens/s",
        note=f"{scaled(throughput.prompt_tokens_per_s)} prompt tokens/s; {number(throughput.completed_per_s)} answers/s"
        + a_worker,
    )
    if (cache := overall.cache) is not None:
        note = f"of prompt tokens; {percent(cache.pulled_share)} pulled from other workers"
        yield Card(label="Cache hit", value=percent(cache.hit_share.value), note=note)
    if overall.bytes_per_transfer is not None:
        note = f"{count(overall.num_transfers, 'transfer')} of {scaled(overall.bytes_per_transfer, 'B')}"
        exposed = _both(overall.latencies.transfer_exposed)
        yield Card(label="Exposed transfer: p50 / p99", value=exposed, note=f"{note}; what prefill did not hide")
    if overall.num_replans:
        yield Card(label="Replans", value=f"{overall.num_replans:,}", note="attempts beyond each request's first")
    if summary.peak_queued:
        yield Card(label="Longest line", value=count(summary.peak_queued, "request"), note="in the router")
    if (off := overall.prediction) is not None:
        value = f"{duration(off.median_s)} / {duration(off.p90_abs_s)}"
        yield Card(label="Forecasts of TTFT off by: median / p90", value=value, note="above 0: later than forecast")
    yield Card(
        label="Delay of the generator, p99",
        value=duration(generator.lag_p99_s),
        note=f"at most {duration(generator.lag_max_s)}; noticed answers {duration(generator.loop_lag_p99_s)} late;"
        f" {count(generator.num_processes, 'process', 'processes')}, {percent(generator.cpu_share, 0)} of a core",
        tone=Tone.BAD if generator.warnings else Tone.GOOD,
    )


def share_table(summary: Summary) -> Table:
    """Return how the requests of each kind ended."""
    columns: dict[str, Callable[[KindSummary], str]] = {
        "kind": lambda kind: kind.kind,
        "requests": lambda kind: f"{kind.num_requests:,}",
        "good": lambda kind: f"{kind.num_good:,} ({percent(kind.good_share.value)})",
        "late TTFT": lambda kind: _some(kind.num_ttft_misses),
        "slow TPOT": lambda kind: _some(kind.num_tpot_misses),
        "refused": lambda kind: _some(kind.num_refused),
        "failed": lambda kind: _some(kind.num_failed),
        "timed out": lambda kind: _some(kind.num_timed_out),
        "cancelled": lambda kind: _some(kind.num_cancelled),
        "cached": lambda kind: UNKNOWN if kind.cache is None else percent(kind.cache.hit_share.value),
    }
    return table_of(summary.distinct_kinds, columns, strong_rows=frozenset([0]))


def latency_table(summary: Summary) -> Table:
    """Return the latencies of each kind, and the server's own of all; without rows where no request is complete."""
    columns = ("kind", "measure", *(f"p{100 * p:g}" for p in PERCENTILES), "p99 between", "mean", "max")
    rows = [
        (
            kind,
            name,
            *(quoted(distribution.at(p)) for p in PERCENTILES),
            between(distribution.at(0.99).estimate),
            duration(distribution.mean.value),
            duration(distribution.max),
        )
        for kind, name, distribution in _measured(summary)
    ]
    return Table(columns=columns, rows=tuple(rows), text_columns=frozenset(["measure"]))


def worker_table(pools: Sequence[WorkerSummary], workers: Sequence[WorkerSummary]) -> Table:
    """Return the work of pools, in bold, and of workers."""
    columns: dict[str, Callable[[WorkerSummary], str]] = {
        "pool": lambda pool: pool.name,
        "role": lambda pool: pool.role,
        "workers": lambda pool: str(pool.num_workers),
        "busy": lambda pool: or_unknown(pool.busy, whole_percent),
        "running": lambda pool: or_unknown(pool.mean_running, number),
        "waiting": lambda pool: or_unknown(pool.mean_waiting, number),
        "KV mean": lambda pool: or_unknown(pool.mean_kv, whole_percent),
        "KV peak": lambda pool: or_unknown(pool.peak_kv, whole_percent),
        "prompts for others": lambda pool: f"{pool.num_prefilled:,}",
        "answers": lambda pool: f"{pool.num_decoded:,}",
        "computed tok/s": lambda pool: or_unknown(pool.computed_tokens_per_s, scaled),
        "output tok/s": lambda pool: scaled(pool.output_tokens_per_s),
        "a worker": lambda pool: scaled(pool.output_tokens_per_worker_s),
    }
    bold = frozenset(range(len(pools)))
    return table_of([*pools, *workers], columns, text_columns=frozenset(["role"]), strong_rows=bold)


def failure_table(summary: Summary) -> Table:
    """Return the incomplete requests by reason."""
    rows = [(each.outcome.replace("_", " "), f"{each.num_requests:,}", each.error) for each in summary.failures]
    return Table(columns=("outcome", "requests", "why"), rows=tuple(rows), text_columns=frozenset(["why"]))


def terminal_table(table: Table) -> TerminalTable:
    """Return a table without lines for a terminal."""
    shown = TerminalTable(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(table.columns):
        is_text = not place or column in table.text_columns
        is_long = max((len(row[place]) for row in table.rows), default=0) > _LONG
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not is_long)
    for place, row in enumerate(table.rows):
        shown.add_row(*map(Text, row), style="bold" if place in table.strong_rows else "")
    return shown


def filled_table(items: Iterable[_T], columns: Mapping[str, Callable[[_T], str]]) -> TerminalTable:
    """Return a table with a row for each item, whose cells the columns write."""
    return terminal_table(table_of(items, columns))


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


def whole_percent(share: float) -> str:
    """Return a share as percent without decimals."""
    return percent(share, 0)


def _title(summary: Summary) -> Text:
    info, window = summary.info, summary.window
    workers = " + ".join(f"{number_of} {role}" for role, number_of in info.num_workers.items() if number_of)
    parts = {"in the warm-up": window.num_before, "in the cool-down": window.num_after}
    left_out = [f"{number_of} {what}" for what, number_of in parts.items() if number_of]
    told = "" if info.told_slo is None else f"told the server: {objectives(info.told_slo)}\n"
    return Text.assemble(
        (info.name, "bold"),
        f" · {info.system}{', ' + workers if workers else ''} · {info.model} · {info.target}\n",
        told,
        f"{count(window.num_counted, 'request')}, {window.rule}",
        f"; left out: {', '.join(left_out)}\n" if left_out else "\n",
    )


def _verdict(summary: Summary, required_share: float) -> Text:
    share = summary.overall.good_share
    if share.value >= required_share:
        verdict, style = "SLOs are met", _STYLES[Tone.GOOD]
    elif share.high < required_share:
        verdict, style = "SLOs are not met", _STYLES[Tone.BAD]
    else:
        verdict, style = "SLOs are not met, by less than the uncertainty", CAUTION
    facts = f"{percent(share.value)} good [{between(share, percent)}], {percent(required_share, 0)} wanted\n"
    return Text.assemble((f"{verdict}: ", style), facts)


def _card_grid(cards: Iterable[Card]) -> TerminalTable:
    grid = TerminalTable.grid(padding=(0, 2))
    for card in cards:
        grid.add_row(Text(card.label), Text(card.value, style=_STYLES[card.tone]), Text(card.note, style="dim"))
    return grid


def _measured(summary: Summary) -> Iterator[tuple[str, str, MeasuredDistribution]]:
    """Yield the kind, the name and the distribution of each measure that has values."""
    groups = [(kind.kind, kind.latencies, _USERS) for kind in summary.distinct_kinds]
    for kind, latencies, names in (*groups, ("server", summary.overall.latencies, _STAGES)):
        for name, attribute in names.items():
            distribution: MeasuredDistribution | None = getattr(latencies, attribute)
            if distribution is not None:
                yield kind, name, distribution


def _needed(summary: Summary) -> str:
    """Return the requests that the marked percentiles take; empty when none is marked."""
    needed: dict[str, int] = {}
    for _, name, distribution in _measured(summary):
        for percentile in distribution.percentiles:
            if not percentile.is_sufficient:
                what = f"p{100 * percentile.p:g}" + (" of ITL" if name == "ITL" else "")
                needed[what] = max(needed.get(what, 0), percentile.num_needed)
    return ", ".join(f"{what} takes {number_of:,}" for what, number_of in sorted(needed.items()))


def _both(times: MeasuredDistribution | None) -> str:
    return UNKNOWN if times is None else f"{quoted(times.at(0.5))} / {quoted(times.at(0.99))}"


def _some(number_of: int) -> str:
    return f"{number_of:,}" if number_of else UNKNOWN
