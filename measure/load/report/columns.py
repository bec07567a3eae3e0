"""A run as columns, the data of all plots. Times in seconds since the run began; NaN where there is none."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.slo import Slo
from measure.load.records import RequestRecord, Run
from measure.load.window import Window
from measure.pages.distributions import ShareScale, rolling
from measure.pages.figures import Curve, LimitLine
from measure.pages.wording import duration

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_NUM_MOMENTS = 400


class Measure(enum.Enum):
    """A latency whose distribution is drawn."""

    TTFT = "Time to first token (TTFT)"
    TPOT = "Time per output token (TPOT)"
    ITL = "Inter-token latency (ITL)"
    E2E = "End to end (E2E)"

    @property
    def scale(self) -> ShareScale:
        """Scale on which the distribution is shown first: the tail of single gaps."""
        return ShareScale.TAIL if self is Measure.ITL else ShareScale.EVEN

    def limits(self, slo: Slo) -> tuple[LimitLine, ...]:
        """Return the objective as a line across the figure; nothing where there is none."""
        if self is Measure.E2E:
            return ()
        return (objective(slo.ttft_s if self is Measure.TTFT else slo.tpot_s),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """Gaps between pieces of the answers of complete requests, in order of the requests."""

    end_s: Floats
    """Arrival of the piece that ended the gap."""
    gap_s: Floats
    request: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestColumns:
    """Requests of a run, one per row, in the order in which they were due."""

    requests: tuple[RequestRecord, ...]
    kinds: tuple[str, ...]
    kind: npt.NDArray[np.str_]
    due_s: Floats
    end_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    num_prompt_tokens: npt.NDArray[np.int64]
    is_complete: Mask
    is_counted: Mask
    """Due within the window of the summary."""
    gaps: Gaps

    @property
    def is_measured(self) -> Mask:
        """Counted and complete requests, whose latencies are in the summary."""
        return self.is_counted & self.is_complete

    def of_kind(self, kind: str) -> Mask:
        """Return the mask of the requests of a kind."""
        return np.asarray(self.kind == kind, dtype=np.bool_)

    def measured(self, measure: Measure, kind: str | None = None) -> Floats:
        """Return the values of a latency over the measured requests, of one kind or of all."""
        rows = self.is_measured if kind is None else self.is_measured & self.of_kind(kind)
        if measure is Measure.ITL:
            return self.gaps.gap_s[rows[self.gaps.request]]
        times = {Measure.TTFT: self.ttft_s, Measure.TPOT: self.tpot_s, Measure.E2E: self.e2e_s}
        return known(times[measure][rows])

    def server(self, name: str) -> Floats:
        """Return a field of the server's reports, NaN where it is missing."""
        return _floats([getattr(request.server, name) for request in self.requests])


def columns_of(run: Run, window: Window) -> RequestColumns:
    """Return a run's requests as columns."""
    requests = tuple(sorted(run.requests, key=lambda request: request.index))
    due_s = _floats([request.due_s for request in requests])
    is_complete = np.array([request.is_complete for request in requests], dtype=np.bool_)
    kind = np.array([request.kind for request in requests], dtype=np.str_)
    return RequestColumns(
        requests=requests,
        kinds=tuple(sorted(set(kind.tolist()))),
        kind=kind,
        due_s=due_s,
        end_s=_floats([request.end_s for request in requests]),
        ttft_s=_floats([request.ttft_s for request in requests]),
        tpot_s=_floats([request.tpot_s for request in requests]),
        e2e_s=_floats([request.e2e_s for request in requests]),
        num_prompt_tokens=np.array([request.num_prompt_tokens for request in requests], dtype=np.int64),
        is_complete=is_complete,
        is_counted=(due_s >= window.start_s) & (due_s <= window.end_s),
        gaps=_gaps(requests),
    )


def known(values: Floats) -> Floats:
    """Return the values that are not NaN."""
    return values[~np.isnan(values)]


def objective(value_s: float) -> LimitLine:
    """Return an objective as a line across a figure."""
    return LimitLine(value=value_s, text=f"objective {duration(value_s)}")


def rolling_curves(prefix: str, at_s: Floats, values: Floats, *, color: str) -> list[Curve]:
    """Return the median and the 99th percentile over time, named after `prefix`."""
    bins = rolling(at_s, values, percentiles=(50.0, 99.0))
    return [
        Curve(name=f"{prefix}p{p:g}", x=bins.at_s, y=bins.values[p], color=color, dash=dash)
        for p, dash in ((50.0, "dot"), (99.0, "solid"))
    ]


def open_requests(columns: RequestColumns) -> tuple[Floats, Floats]:
    """Return (moments, open requests (due, not ended) at each), evenly over the run."""
    at_s = np.linspace(0, float(columns.end_s.max(initial=0.0)), _NUM_MOMENTS)
    due, ended = np.sort(columns.due_s), np.sort(columns.end_s)
    num_open = np.searchsorted(due, at_s, side="right") - np.searchsorted(ended, at_s, side="right")
    return at_s, num_open.astype(np.float64)


def _gaps(requests: Sequence[RequestRecord]) -> Gaps:
    rows = [row for row, request in enumerate(requests) if request.is_complete and len(request.chunk_s) > 1]
    if not rows:
        return Gaps(end_s=np.zeros(0), gap_s=np.zeros(0), request=np.zeros(0, dtype=np.int64))
    chunks = [np.array(requests[row].chunk_s) for row in rows]
    return Gaps(
        end_s=np.concatenate([times[1:] for times in chunks]),
        gap_s=np.concatenate([np.diff(times) for times in chunks]),
        request=np.repeat(rows, [times.size - 1 for times in chunks]),
    )


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)
