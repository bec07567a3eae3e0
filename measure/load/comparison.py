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
from measure.load.tables import UNKNOWN, UNSURE, plain_table
from measure.load.window import Window, counted
from measure.pages.wording import count, duration, number, percent

_TIMES = {"ttft": (0.5, 0.9, 0.99), "itl": (0.5, 0.99), "tpot": (0.5, 0.99), "e2e": (0.5, 0.99)}
"""Percentiles that are compared, by field of `Latencies`."""


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

    def is_significant(self, place: int) -> bool:
        """Return whether the interval of a run's change excludes "no change"."""
        cell = self.cells[place]
        if cell is None or cell.change is None:
            return False
        return not cell.change.low <= self._same <= cell.change.high

    def verdict(self, place: int) -> bool | None:
        """Return whether a run is better than the first; None where the change may be chance."""
        cell = self.cells[place]
        if cell is None or cell.change is None or not self.is_significant(place):
            return None
        return (cell.change.value > self._same) == self.more_is_better

    @property
    def _same(self) -> float:
        return 0.0 if self.unit is MeasureUnit.SHARE else 1.0


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
class _Sample:
    """Measures of one run for one kind."""

    quoted: dict[str, tuple[Estimate, bool]]
    """Each measure, and whether the run had enough requests for it."""
    resamples: dict[str, Floats]
    """Each measure in every resample."""


_GOOD, _GOODPUT = "good", "goodput"


def compare(runs: Sequence[Run], summaries: Sequence[Summary]) -> RunComparison:
    """Compare runs with the first of them. `summaries` belong to the runs and define which requests count."""
    samples = [counted(run.requests, summary.window) for run, summary in zip(runs, summaries, strict=True)]
    matched = [_matched(requests, samples[0]) for requests in samples]
    is_paired = tuple(requests is not None for requests in matched)
    rows: list[Row] = []
    for kind in _common_kinds(summaries):
        of_kind = [
            _sample(kind, partners or requests, summary, seed=0 if partners else place)
            for place, (partners, requests, summary) in enumerate(zip(matched, samples, summaries, strict=True))
        ]
        rows += _rows(kind, of_kind)
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


def _sample(kind: str, requests: Sequence[RequestRecord], summary: Summary, *, seed: int) -> _Sample | None:
    own = [request for request in requests if kind in (ALL, request.kind)]
    found = next((candidate for candidate in summary.kinds if candidate.kind == kind), None)
    if found is None:
        return None
    resampler = Resampler(len(own), seed=seed)
    is_good = np.array([summary.slo.is_good(request) for request in own], dtype=np.float64)
    quoted = {_GOOD: (found.good_share, True), _GOODPUT: (found.goodput_per_s, True)}
    resamples = {
        _GOOD: resampler.ratios(is_good, np.ones(is_good.size)),
        _GOODPUT: resampler.ratios(is_good, _shares_of_time(own, summary.window)),
    }
    for name, shares in _TIMES.items():
        distribution: MeasuredDistribution | None = getattr(found.latencies, name)
        if distribution is None:
            continue
        columns = resampler.quantiles(*latency_values(name, own), shares)
        for column, share in enumerate(shares):
            percentile = distribution.at(share)
            quoted[_label(name, share)] = percentile.estimate, percentile.is_sufficient
            resamples[_label(name, share)] = columns[:, column]
    return _Sample(quoted=quoted, resamples=resamples)


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


def _label(name: str, share: float) -> str:
    return f"{name.upper()} p{100 * share:g}"


def _rows(kind: str, samples: Sequence[_Sample | None]) -> Iterator[Row]:
    labels = [_label(name, share) for name, shares in _TIMES.items() for share in shares]
    for name, unit in (
        (_GOOD, MeasureUnit.SHARE),
        (_GOODPUT, MeasureUnit.PER_S),
        *((label, MeasureUnit.SECONDS) for label in labels),
    ):
        cells = tuple(_cell(name, unit, sample, samples[0] if place else None) for place, sample in enumerate(samples))
        if any(cells):
            yield Row(kind=kind, name=name, unit=unit, more_is_better=unit is not MeasureUnit.SECONDS, cells=cells)


def _cell(name: str, unit: MeasureUnit, sample: _Sample | None, first: _Sample | None) -> ComparedValue | None:
    if sample is None or name not in sample.quoted:
        return None
    change = None
    if first is not None and name in first.quoted:
        change = _change(unit, sample.resamples[name], first.resamples[name])
    value, is_sufficient = sample.quoted[name]
    return ComparedValue(value=value, change=change, is_sufficient=is_sufficient)


def _change(unit: MeasureUnit, own: Floats, first: Floats) -> Estimate | None:
    if unit is MeasureUnit.SHARE:
        return Estimate.of(own - first)
    if not np.all(first > 0):  # no ratio in some resamples
        return None
    return Estimate.of(own / first)


_BETTER, _WORSE, _CAUTION = "bold green", "bold red", "bold yellow"


def comparison_view(comparison: RunComparison, names: Sequence[str]) -> RenderableType:
    """Return runs side by side, each but the first with its change; coloured changes exceed chance."""
    letters = [ascii_uppercase[place % len(ascii_uppercase)] for place in range(len(names))]
    table = plain_table("", "", num_left=2)
    for place, letter in enumerate(letters):
        table.add_column(letter, justify="right", no_wrap=True)
        if place:
            table.add_column(f"{letter} against {letters[0]}", justify="right", no_wrap=True)
    previous = ""
    for row in comparison.rows:
        if previous and row.kind != previous:
            table.add_section()
        table.add_row(row.kind if row.kind != previous else "", row.name, *_comparison_cells(row))
        previous = row.kind
    return Group(*_legend(comparison, letters, names), "", table, "", *_notes(comparison, letters))


def _legend(comparison: RunComparison, letters: Sequence[str], names: Sequence[str]) -> Iterator[Text]:
    for letter, name, summary in zip(letters, names, comparison.summaries, strict=True):
        facts = (
            f" {name} · {summary.info.system} · {summary.info.target} · {count(summary.window.num_counted, 'request')}"
        )
        yield Text.assemble((letter, "bold"), facts)


def _notes(comparison: RunComparison, letters: Sequence[str]) -> Iterator[Text]:
    """Yield how to read the figures, and the warnings of every run."""
    yield Text(
        "×1.2 [1.1 – 1.3]: the ratio and its 95 % interval (pt: difference in points). Coloured: equal runs would"
        " differ this much in fewer than 1 of 20 cases; 1 of 20 rows is coloured by chance. Intervals do not cover"
        " differences between runs at different times.",
        style="dim",
    )
    yield Text(comparison.pairing(letters), style="dim")
    for letter, summary in zip(letters, comparison.summaries, strict=True):
        for warning in summary.warnings:
            yield Text(f"! {letter}: {warning}", style=_CAUTION)


def _comparison_cells(row: Row) -> Iterator[Text]:
    for place, cell in enumerate(row.cells):
        yield Text(value_text(row, cell))
        if place:
            how = row.verdict(place)
            yield Text(change_text(row, cell, "[{} – {}]"), style={None: "", True: _BETTER, False: _WORSE}[how])


def value_text(row: Row, cell: ComparedValue | None) -> str:
    """Return the value of a run in words, marked where too few requests lie beyond it."""
    if cell is None:
        return UNKNOWN
    write = {MeasureUnit.SECONDS: duration, MeasureUnit.PER_S: number, MeasureUnit.SHARE: percent}[row.unit]
    return f"{'' if cell.is_sufficient else UNSURE}{write(cell.value.value)}"


def change_text(row: Row, cell: ComparedValue | None, bounds: str) -> str:
    """Return a change in words: a ratio, or a difference in points, with its interval in the form of `bounds`."""
    if cell is None or cell.change is None:
        return UNKNOWN
    if row.unit is MeasureUnit.SHARE:
        points = cell.change.scaled(100)
        return f"{points.value:+.1f} {bounds.format(f'{points.low:+.1f}', f'{points.high:+.1f}')} pt"
    change = cell.change
    return f"×{number(change.value)} {bounds.format(number(change.low), number(change.high))}"
