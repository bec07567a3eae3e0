"""The table and the page of `benchmarks.planner`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.outcome import NUM_BINS, Outcome
from cluster.planner.plan import Pool
from measure.pages.axes import Axis, Unit
from measure.pages.figures import Curve, Frame, LimitLine, compact, line_figure, new_figure, plain
from measure.pages.page import Page, PageSection, Panel, Table, Width, write_page
from measure.pages.theme import BLUE, GREY, ORANGE, PALETTE, TEAL
from measure.workload.traces import Trace

_KIND_NAMES = {
    "fixed": "fixed split",
    "ray": "queue length, as Ray Serve",
    "dynamo": "load mode, as Dynamo",
    "ours": "our planner",
}
_KIND_COLORS = {"fixed": GREY, "ray": PALETTE[1], "dynamo": PALETTE[3], "ours": PALETTE[0]}
_HOURS = Axis(title="hour of the day")
_TIMES = 721
_BIN_HOURS = (np.arange(NUM_BINS) + 0.5) * 24 / NUM_BINS
_SMOOTH = 3
"""Parts of the day, 20 minutes each, that a point of the attainment's curve covers."""


def markdown_table(outcomes: Sequence[Outcome], *, goal: float) -> str:
    """Return one row per arm; those that reach the goal are marked."""
    rows = [_row(each) | {"holds": "yes" if each.good_share >= goal else "no"} for each in outcomes]
    if not rows:
        return ""
    lines = [f"| {' | '.join(cells)} |" for cells in (rows[0], *(row.values() for row in rows))]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def cheapest(outcomes: Sequence[Outcome], *, goal: float) -> Outcome | None:
    """Return the arm that reaches the goal with the fewest GPU-hours; None if none does."""
    return min(
        (outcome for outcome in outcomes if outcome.good_share >= goal), key=lambda each: each.gpu_hours, default=None
    )


def write_report(out: Path, outcomes: Sequence[Outcome], *, trace: Trace, goal: float) -> Path:
    """Write `report.html`: a table, GPU-hours against attainment, and each arm's day. Raises OSError."""
    shown = [best for kind in _KIND_NAMES if (best := _best([o for o in outcomes if o.kind == kind], goal))]
    max_size = max((max(outcome.size(pool, _times(outcome))) for outcome in shown for pool in Pool), default=0)
    sections = (
        PageSection(
            title="What it costs to hold the objectives",
            panels=(
                Panel(
                    title="GPU-hours against attainment",
                    look_for="Up and to the left is best: more good requests for fewer GPU-hours.",
                    content=_scatter(outcomes, goal),
                ),
                Panel(title="All arms", content=_table(outcomes, goal)),
            ),
        ),
        PageSection(
            title="The day",
            intro="For each kind the cheapest arm that reaches the goal, or the closest one.",
            panels=(
                *(Panel(title="Load", content=_load(each), width=Width.HALF) for each in shown[:1]),
                Panel(
                    title="Good requests over the day",
                    look_for="Where a curve falls, the pools were too small or grew too late.",
                    content=_attainment(shown, goal),
                    note="Means over an hour of the day.",
                    width=Width.HALF,
                ),
                *(
                    Panel(
                        title=f"Workers of {outcome.name} ({_KIND_NAMES[outcome.kind]})",
                        content=_pools(outcome, max_size=max_size),
                        note="Paid workers, including starting and draining ones.",
                        width=Width.HALF,
                    )
                    for outcome in shown
                ),
            ),
        ),
    )
    path = out / "report.html"
    title = f"Pools that follow a day: {trace.name}"
    subtitle = f"{len(trace.requests):,} requests in a day of {trace.duration_s / 3600:.1f} simulated hours"
    write_page(path, Page(title=title, subtitle=subtitle, sections=sections, verdict=_verdict(outcomes, goal)))
    return path


def _verdict(outcomes: Sequence[Outcome], goal: float) -> tuple[str, ...]:
    fixed = cheapest([outcome for outcome in outcomes if outcome.kind == "fixed"], goal=goal)
    lines: list[str] = []
    for kind, name in _KIND_NAMES.items():
        best = cheapest([outcome for outcome in outcomes if outcome.kind == kind], goal=goal)
        if best is None:
            lines.append(f"{name}: no arm reaches {goal:.1%} good requests.")
            continue
        line = f"{name}: {best.name} has {best.good_share:.2%} good requests for {best.gpu_hours:.1f} GPU-hours"
        if fixed is not None and best is not fixed:
            change = best.gpu_hours / fixed.gpu_hours - 1
            line += f", {abs(change):.0%} {'more' if change > 0 else 'less'} than {fixed.name}"
        lines.append(f"{line}.")
    return tuple(lines)


def _best(outcomes: Sequence[Outcome], goal: float) -> Outcome | None:
    return cheapest(outcomes, goal=goal) or max(outcomes, key=lambda outcome: outcome.good_share, default=None)


def _row(outcome: Outcome) -> dict[str, str]:
    """Return the cells of an arm by column."""
    return {
        "arm": outcome.name,
        "GPU-hours": f"{outcome.gpu_hours:.1f}",
        "good %": f"{100 * outcome.good_share:.2f}",
        "worst part of the day %": f"{100 * outcome.worst_bin:.1f}",
        "TTFT in time %": f"{100 * outcome.ttft_share:.2f}",
        "gaps in time %": f"{100 * outcome.tpot_share:.2f}",
        "TTFT p50/p99 s": f"{outcome.ttft_p50_s:.2f} / {outcome.ttft_p99_s:.1f}",
        "hit %": f"{100 * outcome.hit:.1f}",
        "started": str(outcome.num_starts),
        "flipped": str(outcome.num_flips),
        "left": str(outcome.num_leaves),
        "answers moved": str(outcome.num_moves),
    }


def _table(outcomes: Sequence[Outcome], goal: float) -> Table:
    rows = [_row(outcome) for outcome in outcomes]
    holding = frozenset(i for i, outcome in enumerate(outcomes) if outcome.good_share >= goal)
    columns = tuple(rows[0]) if rows else ("no arm has run",)
    return Table(columns=columns, rows=tuple(tuple(row.values()) for row in rows), strong_rows=holding)


def _scatter(outcomes: Sequence[Outcome], goal: float) -> Any:
    frame = Frame(
        x=Axis(title="GPU-hours"),
        y=Axis(title="good requests", unit=Unit.SHARE),
        y_limits=(LimitLine(value=goal, text=f"goal {goal:.1%}"),),
        height=460,
    )
    figure = new_figure(frame)
    for kind, name in _KIND_NAMES.items():
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        if not of_kind:
            continue
        figure.add_scatter(
            x=compact([outcome.gpu_hours for outcome in of_kind]),
            y=compact([outcome.good_share for outcome in of_kind]),
            mode="markers+text",
            name=plain(name),
            text=[plain(outcome.name) for outcome in of_kind],
            textposition="bottom right",
            textfont={"size": 11},
            cliponaxis=False,
            marker={"color": _KIND_COLORS[kind], "size": 10},
            hovertemplate="<b>%{text}</b><br>%{x:.1f} GPU-hours, %{y:.2%} good<extra></extra>",
        )
    hours = [outcome.gpu_hours for outcome in outcomes] or [0.0]
    room = 0.15 * (max(hours) - min(hours)) + 1.0  # names are to the right of their points
    figure.update_xaxes(range=[min(hours) - room / 2, max(hours) + room])
    figure.update_yaxes(tickformat=".1%")
    return figure


def _load(outcome: Outcome) -> Any:
    rates = np.array(outcome.arrived) * NUM_BINS / outcome.day_s
    curve = Curve(name="requests", x=_BIN_HOURS, y=rates, color=TEAL)
    return _over_the_day([curve], Axis(title="requests that come", unit=Unit.RATE, starts_at_zero=True))


def _attainment(outcomes: Sequence[Outcome], goal: float) -> Any:
    curves = [
        Curve(name=outcome.name, x=_BIN_HOURS, y=_smooth(outcome), color=_KIND_COLORS[outcome.kind])
        for outcome in outcomes
    ]
    limit = LimitLine(value=goal, text=f"goal {goal:.1%}")
    return _over_the_day(curves, Axis(title="good requests", unit=Unit.SHARE), limits=(limit,))


def _smooth(outcome: Outcome) -> np.ndarray:
    window = np.ones(_SMOOTH)
    good, arrived = (np.convolve(values, window, mode="same") for values in (outcome.good, outcome.arrived))
    return np.asarray(good / np.maximum(arrived, 1))


def _times(outcome: Outcome) -> list[float]:
    """Return the times at which pools are drawn."""
    times: list[float] = np.linspace(0, outcome.day_s, _TIMES).tolist()
    return times


def _pools(outcome: Outcome, *, max_size: int) -> Any:
    times = np.array(_times(outcome))
    curves = [
        Curve(
            name=f"{pool} workers",
            x=times / outcome.day_s * 24,
            y=outcome.size(pool, _times(outcome)),
            color=color,
            shape="hv",
        )
        for pool, color in ((Pool.PREFILL, BLUE), (Pool.DECODE, ORANGE))
    ]
    figure = _over_the_day(curves, Axis(title="workers", unit=Unit.COUNT, starts_at_zero=True))
    figure.update_yaxes(range=[0, max_size + 0.5])
    return figure


def _over_the_day(curves: Sequence[Curve], y: Axis, *, limits: tuple[LimitLine, ...] = ()) -> Any:
    figure = line_figure(curves, Frame(x=_HOURS, y=y, y_limits=limits, height=300))
    figure.update_xaxes(range=[0, 24], dtick=3)
    return figure
