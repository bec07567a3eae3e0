"""A run as columns, which is what plots are made of. Times in seconds since the run began; NaN where there is none."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure.load.records import RequestRecord, Run
from measure.load.summary import Window

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """Gaps between pieces of the answers of complete requests, in order of the requests."""

    end_s: Floats
    """When the piece came that ended the gap."""
    gap_s: Floats
    request: npt.NDArray[np.int64]
    """Row of its request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Requests of a run, a row each, in the order in which they were due."""

    requests: tuple[RequestRecord, ...]
    kinds: tuple[str, ...]
    """Distinct ones, by name."""
    kind: npt.NDArray[np.str_]
    due_s: Floats
    end_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    num_prompt_tokens: npt.NDArray[np.int64]
    is_complete: Mask
    is_counted: Mask
    """Due within the window that the summary is of."""
    gaps: Gaps

    @property
    def is_measured(self) -> Mask:
        """Counted and complete: those that have latencies in the summary."""
        return self.is_counted & self.is_complete

    def of_kind(self, kind: str) -> Mask:
        """Return which requests are of a kind."""
        return np.asarray(self.kind == kind, dtype=np.bool_)

    def server(self, name: str) -> Floats:
        """Return a number of the server's report, NaN where it says nothing."""
        return _floats([getattr(request.server, name) for request in self.requests])


def columns_of(run: Run, window: Window) -> Columns:
    """Return a run's requests as columns."""
    requests = tuple(sorted(run.requests, key=lambda request: request.index))
    due_s = _floats([request.due_s for request in requests])
    is_complete = np.array([request.is_complete for request in requests], dtype=np.bool_)
    kind = np.array([request.kind for request in requests], dtype=np.str_)
    return Columns(
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
    """Return the values that there are."""
    return values[~np.isnan(values)]


def open_requests(columns: Columns, num_moments: int = 400) -> tuple[Floats, Floats]:
    """Return (moments, how many requests were due and not ended then), evenly over the run."""
    at_s = np.linspace(0, float(columns.end_s.max(initial=0.0)), num_moments)
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
