"""Runs as columns, the data of all plots. Times in seconds since the run began; NaN where there is none."""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.slo import Slo
from measure.load.measures import latency_values
from measure.load.records import RequestRecord, Run
from measure.load.summary import Summary
from measure.load.window import Window, num_open
from measure.pages.figures import LimitLine
from measure.pages.theme import DASHES, colors_of
from measure.pages.wording import duration

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_MAX_KINDS = 3
"""Most kinds that plots of several runs separate."""
_NUM_MOMENTS = 400


class Measure(enum.Enum):
    """A latency whose distribution is drawn."""

    TTFT = "Time to first token (TTFT)"
    TPOT = "Time per output token (TPOT)"
    ITL = "Inter-token latency (ITL)"
    E2E = "End to end (E2E)"

    def limits(self, slo: Slo) -> tuple[LimitLine, ...]:
        """Return the objective as a line across the figure; nothing where there is none."""
        if self is Measure.E2E:
            return ()
        value_s = slo.ttft_s if self is Measure.TTFT else slo.tpot_s
        return (LimitLine(value=value_s, text=f"objective {duration(value_s)}"),)


class RequestColumns:
    """Requests of a run, one per row, in the order in which they were due."""

    def __init__(self, run: Run, window: Window) -> None:
        self.requests = tuple(sorted(run.requests, key=lambda request: request.index))
        self.kind = np.array([request.kind for request in self.requests], dtype=np.str_)
        self.due_s = self.values(lambda request: request.due_s)
        self.end_s = self.values(lambda request: request.end_s)
        self.ttft_s = self.values(lambda request: request.ttft_s)
        self.num_prompt_tokens = self.values(lambda request: request.num_prompt_tokens)
        self.is_complete: Mask = np.array([request.is_complete for request in self.requests], dtype=np.bool_)
        self.is_counted: Mask = (self.due_s >= window.start_s) & (self.due_s <= window.end_s)

    @property
    def kinds(self) -> list[str]:
        """Kinds of its requests, by name."""
        return sorted(set(self.kind.tolist()))

    @property
    def last_s(self) -> float:
        """End of the last request."""
        return float(self.end_s.max(initial=1e-3))

    def of_kind(self, kind: str | None) -> Mask:
        """Return the mask of the requests of a kind, or of all."""
        return np.asarray(np.full(self.kind.size, fill_value=True) if kind is None else self.kind == kind)

    def values(self, of: Callable[[RequestRecord], float | None]) -> Floats:
        """Return a value of each request."""
        return np.array([of(request) for request in self.requests], dtype=np.float64)

    def server(self, name: str) -> Floats:
        """Return a field of the server's reports."""
        return self.values(lambda request: getattr(request.server, name))

    def measured(self, measure: Measure, kind: str | None) -> Floats:
        """Return the values of a latency over the counted complete requests of a kind."""
        values, owners = latency_values(measure.name.lower(), self.requests)
        return values[(self.is_counted & self.of_kind(kind))[owners]]

    def over_time(self, measure: Measure, kind: str | None) -> tuple[Floats, Floats]:
        """Return (moments, values) of a latency over all complete requests: gaps at their ends, others when due."""
        values, owners = latency_values(measure.name.lower(), self.requests)
        own = self.of_kind(kind)[owners]
        if measure is not Measure.ITL:
            return self.due_s[owners][own], values[own]
        ends = [at_s for request in self.requests if request.is_complete for at_s in request.chunk_s[1:]]
        return np.array(ends, dtype=np.float64)[own], values[own]

    def open_requests(self) -> tuple[Floats, Floats]:
        """Return (moments, requests due and not ended at each), evenly over the run."""
        at_s = np.linspace(0, self.last_s, _NUM_MOMENTS)
        return at_s, num_open(self.requests, at_s).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """A run on a page."""

    run: Run
    summary: Summary
    columns: RequestColumns
    color: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Requests that plots draw in one look."""

    name: str
    color: str
    dash: str
    arm: Arm
    kind: str | None
    """None: all kinds."""


def arms_of(runs: Sequence[Run], summaries: Sequence[Summary]) -> tuple[Arm, ...]:
    """Return the runs of a page, whose names differ."""
    colors = colors_of(run.info.name for run in runs)
    return tuple(
        Arm(run=run, summary=summary, columns=RequestColumns(run, summary.window), color=colors[run.info.name])
        for run, summary in zip(runs, summaries, strict=True)
    )


def series_of(arms: Sequence[Arm]) -> Iterator[Series]:
    """Yield what plots separate: the kinds of one run by colour; runs by colour and their kinds, if few, by dash."""
    if len(arms) == 1:
        for name, color in colors_of(arms[0].columns.kinds).items():
            yield Series(name=name, color=color, dash="solid", arm=arms[0], kind=name)
        return
    kinds = sorted({kind for arm in arms for kind in arm.columns.kinds})
    shown: list[str | None] = [*kinds] if 1 < len(kinds) <= _MAX_KINDS else [None]
    for arm in arms:
        for kind, dash in zip(shown, DASHES, strict=False):
            name = arm.run.info.name if kind is None else f"{arm.run.info.name}, {kind}"
            yield Series(name=name, color=arm.color, dash=dash, arm=arm, kind=kind)
