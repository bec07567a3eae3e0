"""Compares runs, and separates differences from chance.

Each measure of a run is compared with that of the first run, in every resample (`measure.load.estimates`). Runs of the
same requests are compared in pairs: a resample takes the same requests of both, so that easy and hard requests cancel.
Other runs are resampled independently, which finds fewer differences.

Intervals reflect the variation within these runs, not between runs: another hour, another placement of processes.
Repeats show that (`kvrelay experiment`).
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from measure.figures import ALL
from measure.load.estimates import Estimate, Floats, MeasuredDistribution, Resampler
from measure.load.measures import latency_values
from measure.load.records import RequestRecord, Run
from measure.load.summary import Summary
from measure.load.tables import CAUTION, UNKNOWN, UNSURE, between, terminal_table
from measure.load.window import Window, counted
from measure.pages.page import Table
from measure.pages.wording import count, duration, number, percent

_TIMES = {"ttft": (0.5, 0.9, 0.99), "itl": (0.5, 0.99), "tpot": (0.5, 0.99), "e2e": (0.5, 0.99)}
"""Percentiles that are compared, by field of `Latencies`."""


def _label(name: str, share: float) -> str:
    return f"{name.upper()} p{100 * share:g}"


class MeasureUnit(enum.StrEnum):
    """Unit of a measure, which decides how it is written and compared."""

    SECONDS = "seconds"
    PER_S = "per second"
    SHARE = "share"
    """Shares are compared by difference, the other units by ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """A measure of one run."""

    value: Estimate
    change: Estimate | None
    """Ratio to the first run, or difference of shares. None in the first run, and where that has no value."""
    is_sufficient: bool
    """Whether the run had enough requests for this percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measure of all runs."""

    kind: str
    name: str
    unit: MeasureUnit
    more_is_better: bool
    cells: tuple[ComparedValue | None, ...]
    """One per run; None where the run has no value."""

    def verdict(self, place: int) -> bool | None:
        """Return whether a run is better than the first; None where its change may be chance."""
        cell = self.cells[place]
        same = 0.0 if self.unit is MeasureUnit.SHARE else 1.0
        if cell is None or cell.change is None or cell.change.low <= same <= cell.change.high:
            return None
        return (cell.change.value > same) == self.more_is_better


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs side by side."""

    summaries: tuple[Summary, ...]
    rows: tuple[Row, ...]
    is_paired: tuple[bool, ...]
    """Whether each run sent the same requests as the first."""

    def pairing(self, names: Sequence[str]) -> str:
        """Return in words which of the runs are compared request by request with the first."""
        paired = [name for name, is_paired in zip(names[1:], self.is_paired[1:], strict=True) if is_paired]
        return f"Compared request by request: {', '.join(paired)}." if paired else "The runs sent different requests."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A measure of one run for one kind."""

    value: Estimate
    is_sufficient: bool = True
    resamples: Floats

    def against(self, first: "_Measured | None", unit: MeasureUnit) -> ComparedValue:
        """Return the value with its change against that of the first run; without one where either has no ratio."""
        change = None
        if first is not None and unit is MeasureUnit.SHARE:
            change = Estimate.of(self.resamples - first.resamples)
        elif first is not None and np.all(first.resamples > 0):
            change = Estimate.of(self.resamples / first.resamples)
        return ComparedValue(value=self.value, change=change, is_sufficient=self.is_sufficient)


_GOOD, _GOODPUT = "good", "goodput"
_UNITS = {_GOOD: MeasureUnit.SHARE, _GOODPUT: MeasureUnit.PER_S} | {
    _label(name, share): MeasureUnit.SECONDS for name, shares in _TIMES.items() for share in shares
}


def compare(runs: Sequence[Run], summaries: Sequence[Summary]) -> RunComparison:
    """Compare runs with the first of them. `summaries` belong to the runs and define which requests count."""
    samples = [counted(run.requests, summary.window) for run, summary in zip(runs, summaries, strict=True)]
    matched = [_matched(requests, samples[0]) for requests in samples]
    rows: list[Row] = []
    for kind in _common_kinds(summaries):
        measured = [
            _measured(kind, partners or requests, summary, seed=0 if partners else place)
            for place, (partners, requests, summary) in enumerate(zip(matched, samples, summaries, strict=True))
        ]
        for name, unit in _UNITS.items():
            first, *_ = found = [of_run.get(name) for of_run in measured]
            cells = tuple(
                None if each is None else each.against(first if place else None, unit)
                for place, each in enumerate(found)
            )
            if any(cells):
                is_time = unit is MeasureUnit.SECONDS
                rows.append(Row(kind=kind, name=name, unit=unit, more_is_better=not is_time, cells=cells))
    is_paired = tuple(requests is not None for requests in matched)
    return RunComparison(summaries=tuple(summaries), rows=tuple(rows), is_paired=is_paired)


def _matched(requests: Sequence[RequestRecord], first: Sequence[RequestRecord]) -> Sequence[RequestRecord] | None:
    """Return `requests` in the order of the first run; None unless both runs sent the same requests."""
    by_key = {_key(request): request for request in requests}
    keys = [_key(request) for request in first]
    return [by_key[key] for key in keys] if by_key.keys() == set(keys) else None


def _key(request: RequestRecord) -> tuple[str, int, int, int]:
    return request.kind, request.session, request.turn, request.num_wanted_tokens


def _common_kinds(summaries: Sequence[Summary]) -> list[str]:
    """Return "all", and the kinds that the first run shares with another one where there are several."""
    others = {kind.kind for summary in summaries[1:] for kind in summary.kinds}
    common = [kind.kind for kind in summaries[0].kinds if kind.kind in others or len(summaries) == 1]
    return common if len(common) > 2 else [ALL]


def _measured(kind: str, requests: Sequence[RequestRecord], summary: Summary, *, seed: int) -> dict[str, _Measured]:
    own = [request for request in requests if kind in (ALL, request.kind)]
    found = next((candidate for candidate in summary.kinds if candidate.kind == kind), None)
    if found is None:
        return {}
    resampler = Resampler(len(own), seed=seed)
    is_good = np.array([summary.slo.is_good(request) for request in own], dtype=np.float64)
    good = resampler.ratios(is_good, np.ones(is_good.size))
    goodput = resampler.ratios(is_good, _shares_of_time(own, summary.window))
    measured = {
        _GOOD: _Measured(value=found.good_share, resamples=good),
        _GOODPUT: _Measured(value=found.goodput_per_s, resamples=goodput),
    }
    for name, shares in _TIMES.items():
        distribution: MeasuredDistribution | None = getattr(found.latencies, name)
        if distribution is None:
            continue
        columns = resampler.quantiles(*latency_values(name, own), shares)
        for share, resamples in zip(shares, columns.T, strict=True):
            at = distribution.at(share)
            measured[_label(name, share)] = _Measured(
                value=at.estimate, is_sufficient=at.is_sufficient, resamples=resamples
            )
    return measured


def _shares_of_time(requests: Sequence[RequestRecord], window: Window) -> Floats:
    """Return for each request the time since the one before, so that rates vary as arrivals do.

    It is the same for all requests of a burst, whose rate does not depend on arrivals.
    """
    if window.rates_end_s > window.end_s:
        return np.full(len(requests), window.duration_s / len(requests))
    due = np.array([request.due_s for request in requests])
    order = np.argsort(due, kind="stable")
    gaps = np.empty(due.size)
    gaps[order] = np.diff(due[order], prepend=window.start_s)
    return gaps


_WORDS = {_GOOD: "share of good requests"}
_VERDICT = (_GOOD, _GOODPUT, "TTFT p99", "ITL p99", "TPOT p99")


def comparison_view(comparison: RunComparison, names: Sequence[str]) -> RenderableType:
    """Return runs side by side for a terminal, each but the first with its change; changes in bold exceed chance."""
    letters = ascii_uppercase[: len(names)]
    parts: list[RenderableType] = [
        Text.assemble(
            (letter, "bold"),
            f" {name} · {summary.info.system} · {summary.info.target} · {count(summary.window.num_counted, 'request')}",
        )
        for letter, name, summary in zip(letters, names, comparison.summaries, strict=True)
    ]
    how_to_read = (
        "×1.2 [1.1 – 1.3]: the ratio and its 95 % interval (pt: difference in points). Bold: equal runs would differ"
        " this much in fewer than 1 of 20 cases; 1 of 20 rows is bold by chance. Intervals do not cover differences"
        f" between runs at different times. {comparison.pairing(letters)}"
    )
    parts += ["", terminal_table(comparison_table(comparison, letters)), "", Text(how_to_read, style="dim")]
    for letter, summary in zip(letters, comparison.summaries, strict=True):
        parts += [Text(f"! {letter}: {warning}", style=CAUTION) for warning in summary.warnings]
    return Group(*parts)


def comparison_table(comparison: RunComparison, names: Sequence[str]) -> Table:
    """Return a row per measure and kind: its value in each run, and each run's change against the first."""
    columns = ["measure", "kind", names[0]]
    for name in names[1:]:
        columns += [name, f"{name} against {names[0]}"]
    places = range(1, len(names))
    rows = comparison.rows
    strong = [index for index, row in enumerate(rows) if any(row.verdict(place) is not None for place in places)]
    return Table(
        columns=tuple(columns),
        rows=tuple((row.name, row.kind, *_cells(row)) for row in rows),
        text_columns=frozenset(["kind"]),
        strong_rows=frozenset(strong),
    )


def verdicts(comparison: RunComparison, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each run but the first on figures that differ by more than chance."""
    for place, name in enumerate(names[1:], 1):
        changed = [
            f"{_WORDS.get(row.name, row.name)} {_changed(row, place)}"
            for row in comparison.rows
            if row.kind == ALL and row.name in _VERDICT and row.verdict(place) is not None
        ]
        found = "; ".join(changed) or "no headline figure differs by more than chance"
        yield f"{name} against {names[0]}: {found}."


def _cells(row: Row) -> Iterator[str]:
    write = {MeasureUnit.SECONDS: duration, MeasureUnit.PER_S: number, MeasureUnit.SHARE: percent}[row.unit]
    for place, cell in enumerate(row.cells):
        mark = "" if cell is None or cell.is_sufficient else UNSURE
        yield UNKNOWN if cell is None else f"{mark}{write(cell.value.value)}"
        if place:
            yield _changed(row, place)


def _changed(row: Row, place: int) -> str:
    """Return a run's change against the first: a ratio, or a difference in points, and "better" where it is certain."""
    cell = row.cells[place]
    if cell is None or cell.change is None:
        return UNKNOWN
    how = {None: "", True: ", better", False: ", worse"}[row.verdict(place)]
    if row.unit is MeasureUnit.SHARE:
        points = cell.change.scaled(100)
        return f"{points.value:+.1f} [{points.low:+.1f} – {points.high:+.1f}] pt{how}"
    return f"×{number(cell.change.value)} [{between(cell.change, number)}]{how}"
