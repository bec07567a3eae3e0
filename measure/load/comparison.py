"""Whether runs differ by more than chance.

Every measure of a run is compared with the first run's, by what both give in each resample (`measure.load.estimates`).
Runs that asked the same requests are compared in pairs: a resample takes the same requests of both, so that what is
easy or hard about a request cancels. Other runs are resampled independently, which finds less.

An interval knows what happened in these runs and nothing of what happens between runs: another hour, another
placement of processes. Repeats tell that (`kvrelay experiment`).
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from measure.figures import ALL
from measure.load.estimates import Distribution, Estimate, Floats, Resampler
from measure.load.records import RequestRecord, Run
from measure.load.summary import Summary, Window
from measure.load.window import counted


class Unit(enum.StrEnum):
    """How a measure is written, and compared."""

    SECONDS = "seconds"
    PER_S = "per second"
    SHARE = "share"
    """Compared by its difference; others by their ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measure of one run."""

    value: Estimate
    change: Estimate | None
    """Against the first run: a ratio, or a difference of shares. None in the first run, and without values there."""
    is_sufficient: bool
    """Whether the run had enough requests for this percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measure of all runs."""

    kind: str
    name: str
    unit: Unit
    more_is_better: bool
    cells: tuple[Cell | None, ...]
    """None: the run has nothing of the kind."""

    def is_significant(self, place: int) -> bool:
        """Return whether the interval of a run's change leaves out no change at all."""
        cell = self.cells[place]
        if cell is None or cell.change is None:
            return False
        same = 0.0 if self.unit is Unit.SHARE else 1.0
        return not cell.change.low <= same <= cell.change.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs side by side."""

    summaries: tuple[Summary, ...]
    rows: tuple[Row, ...]
    is_paired: tuple[bool, ...]
    """Whether a run asked the same requests as the first."""


@dataclass(frozen=True, slots=True)
class _Times:
    """A latency, and which percentiles of it are compared."""

    name: str
    attribute: str
    """Of `Latencies`."""
    shares: tuple[float, ...]
    of_request: Callable[[RequestRecord], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What one run has of a kind."""

    quoted: dict[str, tuple[Estimate, bool]]
    """The measures, and whether there were enough requests for them."""
    resamples: dict[str, Floats]
    """The same in every resample."""


def _if_any(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


_TIMES = (
    _Times("TTFT", "ttft", (0.5, 0.9, 0.99), lambda request: _if_any(request.ttft_s)),
    _Times("ITL", "itl", (0.5, 0.99), lambda request: request.gaps_s),
    _Times("TPOT", "tpot", (0.5, 0.99), lambda request: _if_any(request.itl_s)),
    _Times("E2E", "e2e", (0.5, 0.99), lambda request: (request.e2e_s,)),
)
_GOOD, _GOODPUT = "good", "goodput"


def compare(runs: Sequence[Run], summaries: Sequence[Summary]) -> Comparison:
    """Compare runs with the first of them; `summaries` are theirs, and say which requests count."""
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
    return Comparison(summaries=tuple(summaries), rows=tuple(rows), is_paired=is_paired)


def _matched(requests: Sequence[RequestRecord], first: Sequence[RequestRecord]) -> Sequence[RequestRecord] | None:
    """Return `requests` in the order of the same requests of the first run; None when they are not the same."""
    by_key = {_key(request): request for request in requests}
    keys = [_key(request) for request in first]
    return [by_key[key] for key in keys] if by_key.keys() == set(keys) else None


def _key(request: RequestRecord) -> tuple[str, int, int, int]:
    return request.kind, request.session, request.turn, request.num_wanted_tokens


def _common_kinds(summaries: Sequence[Summary]) -> list[str]:
    """Return "all", and where there are several the kinds of the first run that another one has."""
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
    for times in _TIMES:
        distribution: Distribution | None = getattr(found.latencies, times.attribute)
        if distribution is None:
            continue
        brought = [times.of_request(request) if request.is_complete else () for request in own]
        values = np.array([value for one in brought for value in one], dtype=np.float64)
        owners = np.repeat(np.arange(len(brought)), [len(one) for one in brought])
        columns = resampler.quantiles(values, owners, times.shares)
        for column, share in enumerate(times.shares):
            percentile = distribution.at(share)
            quoted[_label(times, share)] = percentile.estimate, percentile.is_sufficient
            resamples[_label(times, share)] = columns[:, column]
    return _Sample(quoted=quoted, resamples=resamples)


def _shares_of_time(requests: Sequence[RequestRecord], window: Window) -> Floats:
    """Return for each request the time from the one before it: rates vary by how arrivals do.

    Of a burst, whose rate does not depend on them, it is the same for all.
    """
    if window.rates_end_s > window.end_s:
        return np.full(len(requests), window.duration_s / len(requests))
    due = np.array([request.due_s for request in requests])
    order = np.argsort(due, kind="stable")
    gaps = np.empty(due.size)
    gaps[order] = np.diff(due[order], prepend=window.start_s)
    return gaps


def _label(times: _Times, share: float) -> str:
    return f"{times.name} p{100 * share:g}"


def _rows(kind: str, samples: Sequence[_Sample | None]) -> Iterator[Row]:
    labels = [_label(times, share) for times in _TIMES for share in times.shares]
    for name, unit in ((_GOOD, Unit.SHARE), (_GOODPUT, Unit.PER_S), *((label, Unit.SECONDS) for label in labels)):
        cells = tuple(_cell(name, unit, sample, samples[0] if place else None) for place, sample in enumerate(samples))
        if any(cells):
            yield Row(kind=kind, name=name, unit=unit, more_is_better=unit is not Unit.SECONDS, cells=cells)


def _cell(name: str, unit: Unit, sample: _Sample | None, first: _Sample | None) -> Cell | None:
    if sample is None or name not in sample.quoted:
        return None
    change = None
    if first is not None and name in first.quoted:
        change = _change(unit, sample.resamples[name], first.resamples[name])
    value, is_sufficient = sample.quoted[name]
    return Cell(value=value, change=change, is_sufficient=is_sufficient)


def _change(unit: Unit, own: Floats, first: Floats) -> Estimate | None:
    if unit is Unit.SHARE:
        return Estimate.of(own - first)
    if not np.all(first > 0):  # nothing to compare with, in some resamples at least
        return None
    return Estimate.of(own / first)
