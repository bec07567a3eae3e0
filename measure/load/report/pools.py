"""Panels on pools: running and waiting requests, busy share and KV pages of each worker over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from measure.load.records import PoolSample, WorkerSample
from measure.load.report.columns import Floats
from measure.load.summary import Summary, WorkerSummary
from measure.load.tables import or_unknown
from measure.pages.axes import RUN_TIME, Axis, Unit
from measure.pages.figures import Curve, Frame, compact, line_figure, new_figure, plain, row_column, small_plots
from measure.pages.page import Absent, Panel, table_of
from measure.pages.theme import BLUE, GREY, TEAL, colors_of, translucent
from measure.pages.wording import number, percent, scaled

MAX_LINES = 4
"""Most workers drawn as lines; more are drawn as rows of a heat map."""
MAX_SAMPLES = 600
_BUSY_BINS = 60
NO_SAMPLES = "the target does not report its workers"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSeries:
    """Samples of a worker, thinned to `MAX_SAMPLES`."""

    worker_id: str
    role: str
    at_s: Floats
    samples: tuple[WorkerSample, ...]

    def values(self, of: Callable[[WorkerSample], float | None]) -> Floats:
        """Return a value of each sample; NaN where it is missing."""
        return np.array([of(sample) for sample in self.samples], dtype=np.float64)


def series_of(samples: Sequence[PoolSample]) -> tuple[WorkerSeries, ...]:
    """Return the samples of every worker, by role (prefill first) and name."""
    step = -(-len(samples) // MAX_SAMPLES) or 1
    held: dict[tuple[str, str], list[tuple[float, WorkerSample]]] = {}
    for sample in samples[::step]:
        for worker in sample.workers:
            held.setdefault((worker.role, worker.worker_id), []).append((sample.at_s, worker))
    return tuple(
        WorkerSeries(
            worker_id=worker_id,
            role=role,
            at_s=np.array([at_s for at_s, _ in rows]),
            samples=tuple(worker for _, worker in rows),
        )
        for (role, worker_id), rows in sorted(held.items(), key=lambda item: (item[0][0] != "prefill", item[0]))
    )


def pool_panels(workers: Sequence[WorkerSeries], summary: Summary) -> tuple[Panel, ...]:
    """Return requests, busy share and KV pages over time, and the table of workers."""
    if not workers:
        return (Panel(title="Workers", content=Absent(why=NO_SAMPLES)),)
    roles = dict.fromkeys(worker.role for worker in workers)
    running = tuple(_running_panel(role, [w for w in workers if w.role == role]) for role in roles)
    return (*running, _busy_panel(workers), kv_panel(workers), _table_panel(summary))


def kv_panel(workers: Sequence[WorkerSeries]) -> Panel:
    """Return the use of KV pages of each worker over time."""
    title = "KV pages"
    if len(workers) > MAX_LINES:
        return Panel(
            title=title,
            look_for="Rows that stay dark have no room: requests there wait or preempt others.",
            content=_heat_map(workers, lambda w: w.num_used_blocks / max(1, w.num_blocks), "pages in use"),
            note="Share of pages held by running requests.",
        )
    return Panel(
        title=title,
        look_for="Used pages near the top mean waits and preemptions. Cached pages can be evicted for new requests.",
        content=_kv_areas(workers),
        note="Used: referenced or reserved. Cached: kept for their prefixes, evicted when pages are needed.",
    )


def _running_panel(role: str, workers: Sequence[WorkerSeries]) -> Panel:
    title = f"Requests on {role} workers"
    if len(workers) > MAX_LINES:
        content = _heat_map(workers, lambda w: float(w.num_running + w.num_waiting), "requests", unit=Unit.COUNT)
        return Panel(
            title=title,
            look_for="Uneven rows mean an uneven spread of the load.",
            content=content,
            note="Running and waiting together.",
        )
    curves = []
    colors = colors_of(worker.worker_id for worker in workers)
    for worker in workers:
        name, color = worker.worker_id, colors[worker.worker_id]
        running = worker.values(lambda w: w.num_running)
        waiting = worker.values(lambda w: w.num_waiting)
        curves.append(Curve(name=f"{name} running", x=worker.at_s, y=running, color=color, shape="hv"))
        if waiting.any():
            curves.append(Curve(name=f"{name} waiting", x=worker.at_s, y=waiting, color=color, dash="dot", shape="hv"))
    frame = Frame(x=RUN_TIME, y=Axis(title="requests", unit=Unit.COUNT, starts_at_zero=True), height=290)
    return Panel(
        title=title,
        look_for="Dotted lines above zero: requests wait here, so this pool is the bottleneck.",
        content=line_figure(curves, frame),
    )


def _busy_panel(workers: Sequence[WorkerSeries]) -> Panel:
    title = "Busy share"
    shares = [(worker, *_busy(worker)) for worker in workers]
    curves = [(worker, at_s, busy) for worker, at_s, busy in shares if at_s.size]
    if not curves:
        return Panel(title=title, content=Absent(why="no worker reports the time in steps"))
    if len(curves) > MAX_LINES:
        figure = _heat_rows([(w.worker_id, at_s, busy) for w, at_s, busy in curves], "busy", Unit.SHARE)
    else:
        colors = colors_of(worker.worker_id for worker, _, _ in curves)
        figure = line_figure(
            [
                Curve(
                    name=worker.worker_id,
                    x=at_s,
                    y=busy,
                    color=colors[worker.worker_id],
                    dash="solid" if worker.role == "prefill" else "dash",
                )
                for worker, at_s, busy in curves
            ],
            Frame(x=RUN_TIME, y=Axis(title="of the time", unit=Unit.SHARE, starts_at_zero=True), height=320),
        )
        figure.update_yaxes(range=[0, 1.03])
    return Panel(
        title=title,
        look_for="A pool at 100 % limits the system; a pool far below it has workers to spare.",
        content=figure,
        note="Share of time in engine steps, in each sixtieth of the run.",
    )


def _busy(worker: WorkerSeries) -> tuple[Floats, Floats]:
    """Return (middle of each interval, busy share in it), from differences of the counter."""
    busy_s = worker.values(lambda w: w.busy_s)
    is_known = ~np.isnan(busy_s) & (np.diff(worker.at_s, prepend=-np.inf) > 0)
    at_s, busy_s = worker.at_s[is_known], busy_s[is_known]
    if at_s.size < 2:
        return np.zeros(0), np.zeros(0)
    step = max(1, at_s.size // _BUSY_BINS)
    at_s, busy_s = at_s[::step], busy_s[::step]
    share = np.diff(busy_s) / np.diff(at_s)
    is_valid = share >= 0  # a restarted worker counts from zero
    return ((at_s[1:] + at_s[:-1]) / 2)[is_valid], np.minimum(share[is_valid], 1.0)


def _kv_areas(workers: Sequence[WorkerSeries]) -> Any:
    figure = small_plots([worker.worker_id for worker in workers], num_columns=2, row_height=190)
    for index, worker in enumerate(workers):
        place = row_column(index, len(workers), num_columns=2)
        for name, color, values in (
            ("used", TEAL, worker.values(lambda w: w.num_used_blocks / max(1, w.num_blocks))),
            ("cached", GREY, worker.values(lambda w: w.num_cached_blocks / max(1, w.num_blocks))),
        ):
            figure.add_scatter(
                x=compact(worker.at_s),
                y=compact(values),
                name=name,
                legendgroup=name,
                showlegend=index == 0,
                stackgroup="pages",
                mode="lines",
                line={"width": 0.8, "color": color},
                fillcolor=translucent(color, 0.75 if name == "used" else 0.3),
                hovertemplate=f"{name}: %{{y:.1%}}<extra>{plain(worker.worker_id)}</extra>",
                **place,
            )
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(range=[0, 1.0], tickformat=".0%")
    figure.update_xaxes(ticksuffix=" s")
    return figure


def _heat_map(
    workers: Sequence[WorkerSeries],
    of: Callable[[WorkerSample], float],
    label: str,
    unit: Unit = Unit.SHARE,
) -> Any:
    return _heat_rows([(worker.worker_id, worker.at_s, worker.values(of)) for worker in workers], label, unit)


def _heat_rows(rows: Sequence[tuple[str, Floats, Floats]], label: str, unit: Unit) -> Any:
    """Return a heat map with a row per worker: means over each 240th of the time."""
    end_s = max(float(at_s[-1]) for _, at_s, _ in rows)
    edges = np.linspace(0, end_s, min(240, max(len(at_s) for _, at_s, _ in rows)) + 1)
    table = np.full((len(rows), edges.size - 1), np.nan)
    for index, (_, at_s, values) in enumerate(rows):
        count, _ = np.histogram(at_s, edges)
        total, _ = np.histogram(at_s, edges, weights=values)
        np.divide(total, count, out=table[index], where=count > 0)
    figure = new_figure(Frame(x=RUN_TIME, height=max(260, 110 + 14 * len(rows))))
    figure.add_heatmap(
        z=compact(table),
        x=compact((edges[1:] + edges[:-1]) / 2),
        y=[plain(name) for name, _, _ in rows],
        colorscale=[[0, translucent(BLUE, 0.04)], [1, translucent(BLUE, 1)]],
        zmin=0,
        zmax=1 if unit is Unit.SHARE else None,
        colorbar={"title": {"text": label}, "tickformat": ".0%" if unit is Unit.SHARE else "", "thickness": 12},
        hovertemplate=f"<b>%{{y}}</b><br>%{{x:,.0f}} s: {unit.shows('z')}<extra></extra>",
    )
    figure.update_yaxes(type="category", autorange="reversed", tickformat="", ticksuffix="")
    return figure


def _table_panel(summary: Summary) -> Panel:
    columns: dict[str, Callable[[WorkerSummary], str]] = {
        "worker": lambda worker: worker.name,
        "role": lambda worker: worker.role,
        "prompts for others": lambda worker: f"{worker.num_prefilled:,}",
        "answers": lambda worker: f"{worker.num_decoded:,}",
        "computed tokens/s": lambda worker: or_unknown(worker.computed_tokens_per_s, scaled),
        "output tokens/s": lambda worker: scaled(worker.output_tokens_per_s),
        "busy": lambda worker: or_unknown(worker.busy, percent),
        "running": lambda worker: or_unknown(worker.mean_running, number),
        "waiting": lambda worker: or_unknown(worker.mean_waiting, number),
        "KV mean": lambda worker: or_unknown(worker.mean_kv, percent),
        "KV peak": lambda worker: or_unknown(worker.peak_kv, percent),
    }
    pools = [replace(pool, name=f"all {pool.num_workers}") for pool in summary.pools]
    return Panel(
        title="Workers and pools",
        look_for="Workers of one pool should have equal numbers; the busier pool limits the other.",
        content=table_of(
            [*pools, *summary.workers],
            columns,
            text_columns=frozenset(["role"]),
            strong_rows=frozenset(range(len(pools))),
        ),
        note="Within the counted window; means over its samples.",
    )
