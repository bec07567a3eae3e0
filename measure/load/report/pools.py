"""Panels on pools: requests, busy share and KV pages of each worker over time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from measure.load.records import PoolSample, WorkerSample
from measure.load.report.columns import Floats
from measure.load.summary import Summary
from measure.load.tables import worker_table
from measure.load.workers import increments
from measure.pages.axes import RUN_TIME, Axis, Unit
from measure.pages.figures import Curve, Frame, compact, line_figure, new_figure, plain
from measure.pages.page import Absent, Panel
from measure.pages.theme import BLUE, colors_of, translucent

MAX_LINES = 4
"""Most workers drawn as lines; more are drawn as rows of a heat map."""
_MAX_SAMPLES = 600
_NUM_BINS = 60
_BY_SAMPLE: dict[str, tuple[Callable[[WorkerSample], float], str]] = {
    "Running requests": (
        lambda worker: worker.num_running,
        "Uneven workers of one pool mean an uneven spread of the load.",
    ),
    "Waiting requests": (
        lambda worker: worker.num_waiting,
        "Above zero: requests wait here, so this pool is the bottleneck.",
    ),
    "KV pages in use": (
        lambda worker: worker.num_used_blocks / max(1, worker.num_blocks),
        "Used pages near the top mean waits and preemptions.",
    ),
}
"""Value and hint of each panel, by title; shares are of the whole."""

_Samples = list[tuple[float, WorkerSample]]
"""Samples of one worker, with their moments."""
_Rows = dict[str, tuple[Floats, Floats]]
"""(moments, values) by worker."""


def pool_panels(samples: Sequence[PoolSample], summary: Summary) -> Iterator[Panel]:
    """Yield the table of workers; requests, KV pages and busy share over time."""
    workers: dict[tuple[str, str], _Samples] = {}
    for sample in samples[:: -(-len(samples) // _MAX_SAMPLES) or 1]:
        for worker in sample.workers:
            workers.setdefault((worker.role, worker.worker_id), []).append((sample.at_s, worker))
    if not workers:
        yield Panel(title="Workers", content=Absent(why="the target does not report its workers"))
        return
    yield Panel(
        title="Workers and pools",
        look_for="Workers of one pool should have equal numbers; the busier pool limits the other.",
        content=worker_table(summary.pools, summary.workers),
        note="Within the counted window; means over its samples.",
    )
    seen = {name: workers[role, name] for role, name in sorted(workers, key=lambda key: (key[0] != "prefill", key))}
    for title, (value, look_for) in _BY_SAMPLE.items():
        unit = Unit.SHARE if title.startswith("KV") else Unit.COUNT
        yield Panel(title=title, look_for=look_for, content=_drawn(_values(seen, value), unit))
    busy = {name: found for name, samples in seen.items() if (found := _busy(samples))[0].size}
    yield Panel(
        title="Busy share",
        look_for="A pool at 100 % limits the system; a pool far below it has workers to spare.",
        content=_drawn(busy, Unit.SHARE) if busy else Absent(why="no worker reports the time in steps"),
        note="Share of time in engine steps, in each sixtieth of the run.",
    )


def _values(seen: dict[str, _Samples], value: Callable[[WorkerSample], float]) -> _Rows:
    return {
        name: (np.array([at_s for at_s, _ in samples]), np.array([value(worker) for _, worker in samples]))
        for name, samples in seen.items()
    }


def _busy(samples: _Samples) -> tuple[Floats, Floats]:
    """Return (beginning of each interval, busy share in it)."""
    thinned = samples[:: max(1, len(samples) // _NUM_BINS)]
    at_s, steps = increments([at_s for at_s, _ in thinned], [worker.busy_s for _, worker in thinned])
    return at_s[:-1], np.minimum(steps / np.diff(at_s), 1.0)


def _drawn(rows: _Rows, unit: Unit) -> Any:
    """Return a line per worker, or a heat map with a row per worker: means over each 240th of the time."""
    if len(rows) <= MAX_LINES:
        colors = colors_of(rows)
        curves = [
            Curve(name=name, x=at_s, y=values, color=colors[name], shape="hv") for name, (at_s, values) in rows.items()
        ]
        return line_figure(curves, Frame(x=RUN_TIME, y=Axis(unit=unit, starts_at_zero=True), height=300))
    end_s = max(float(at_s[-1]) for at_s, _ in rows.values())
    edges = np.linspace(0, end_s, min(240, max(at_s.size for at_s, _ in rows.values())) + 1)
    table = np.full((len(rows), edges.size - 1), np.nan)
    for index, (at_s, values) in enumerate(rows.values()):
        count, _ = np.histogram(at_s, edges)
        total, _ = np.histogram(at_s, edges, weights=values)
        np.divide(total, count, out=table[index], where=count > 0)
    figure = new_figure(Frame(x=RUN_TIME, height=max(260, 110 + 14 * len(rows))))
    figure.add_heatmap(
        z=compact(table),
        x=compact((edges[1:] + edges[:-1]) / 2),
        y=[plain(name) for name in rows],
        colorscale=[[0, translucent(BLUE, 0.04)], [1, translucent(BLUE, 1)]],
        zmin=0,
        zmax=1 if unit is Unit.SHARE else None,
        colorbar={"tickformat": ".0%" if unit is Unit.SHARE else "", "thickness": 12},
        hovertemplate=f"<b>%{{y}}</b><br>%{{x:,.0f}} s: {unit.shows('z')}<extra></extra>",
    )
    return figure.update_yaxes(type="category", autorange="reversed", tickformat="", ticksuffix="")
