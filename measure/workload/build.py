"""Builds the workload of a specification."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from measure.workload.sessions import Session, Stream, Workload
from measure.workload.sources import Drawing, Replay, SessionSource, Synthetic
from measure.workload.spec import StreamSpec, TraceStreamSpec, WorkloadError, WorkloadSpec


def build_workload(spec: WorkloadSpec, *, load: float | None = None, seed: int | None = None) -> Workload:
    """Return the workload of a specification; its sessions are drawn during iteration, the same each time.

    `load` scales all open-loop arrivals, traces included, to a mean number of requests per second in total, later turns
    counted. Sessions are the same at every load and only begin at other times. `seed` replaces that of the
    specification. Raises WorkloadError for a load that cannot be reached; TraceError, OSError for an unreadable trace.
    """
    sources = [_source(stream) for stream in spec.streams]
    speed = 1.0 if load is None else _speed(spec, sources, load)
    seed = spec.seed if seed is None else seed
    streams = []
    for position, source in enumerate(sources):
        drawing = Drawing(
            seed=seed,
            position=position,
            num_streams=len(sources),
            speed=speed,
            duration_s=math.inf if spec.duration_s is None else spec.duration_s,
            max_requests=math.inf if spec.max_requests is None else spec.max_requests,
        )
        sessions = _Sessions(source, drawing)
        streams.append(Stream(kind=source.name, sessions=sessions, concurrency=source.concurrency))
    return Workload(
        name=spec.name,
        content=spec.content,
        streams=tuple(streams),
        duration_s=_duration_s(spec, sources, speed),
        seed=seed,
        max_requests=spec.max_requests,
    )


def mean_request_rate(spec: WorkloadSpec) -> float:
    """Return the requests per second of all open-loop streams together, later turns counted; 0 without any.

    A changing rate counts with its mean over the run's duration or, without one, until it is constant; a trace counts
    with its mean, infinite when all requests come at once. Reads traces: raises TraceError, OSError.
    """
    return _request_rate(spec, [_source(stream) for stream in spec.streams])


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Draws the sessions of a source again for each iteration."""

    source: SessionSource
    drawing: Drawing

    def __iter__(self) -> Iterator[Session]:
        return self.source.sessions(self.drawing)


def _source(stream: StreamSpec) -> SessionSource:
    return Replay(stream) if isinstance(stream, TraceStreamSpec) else Synthetic(stream)


def _request_rate(spec: WorkloadSpec, sources: list[SessionSource]) -> float:
    return math.fsum(source.request_rate(spec.duration_s) for source in sources)


def _speed(spec: WorkloadSpec, sources: list[SessionSource], load: float) -> float:
    if not 0 < load < math.inf:
        raise WorkloadError(f"{spec.name}: a load must be a positive number of requests per second, not {load:g}")
    rate = _request_rate(spec, sources)
    if not 0 < rate < math.inf:
        what = "it has no open-loop arrivals" if rate == 0 else "all requests of its trace come at once"
        raise WorkloadError(f"{spec.name}: cannot be scaled to {load:g} requests/s: {what}")
    return load / rate


def _duration_s(spec: WorkloadSpec, sources: list[SessionSource], speed: float) -> float:
    if spec.duration_s is not None:
        return spec.duration_s
    return max(source.last_start_s(speed) for source in sources)
