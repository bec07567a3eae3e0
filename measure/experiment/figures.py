"""Plots of an experiment: curves over the load, capacity by shape, and what gives way first.

A few arms have a curve and a colour each. When there are many, only the best ones are shown; of several sizes these are
the best split of each and its aggregated rival, with a colour for each size, by the load per worker. Marks of measured
points are filled, those of simulated ones hollow; lines of aggregated arms are dashed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller

from common.slo import Slo
from measure.experiment.analysis import ArmFinding, Findings, Limit, diagnose
from measure.experiment.curves import Reading
from measure.experiment.points import Arm, LoadUnit, MeanUnit, Point, Source, most_good_sessions
from measure.figures import ALL
from measure.load.estimates import Estimate
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Curve, Frame, LimitLine, compact, line_figure, new_figure, plain, whiskers
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import BLUE, GREY, MAGENTA, ORANGE, PALETTE, PURPLE, SAND, TEAL, colors_of
from measure.pages.wording import count, percent

_MAX_ARMS = 8
"""Number of curves that can be told apart."""
_WIDE = 8.0
"""Factor between loads above which their axis is logarithmic."""
_ROW = 26
"""Height of an arm's row in pixels."""
_LIMIT_COLORS = {
    Limit.NOTHING: TEAL,
    Limit.PREFILL: BLUE,
    Limit.DECODE: ORANGE,
    Limit.MEMORY: MAGENTA,
    Limit.WORKERS: SAND,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """An arm that has a curve."""

    finding: ArmFinding
    source: Source
    name: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Arms that have curves, and the axis of their loads."""

    shown: tuple[_Shown, ...]
    is_thinned: bool
    """Whether arms are left out."""
    unit: MeanUnit | None
    """Unit that rates are divided by when those of several sizes are left out; None: they are not divided."""

    @classmethod
    def of(cls, findings: Sequence[Findings]) -> "Sheet":
        """Return the sheet of all sources."""
        chosen = [(each.source, arm) for each in findings for arm in _chosen(each)]
        is_thinned = len(chosen) < sum(len(each.arms) for each in findings)
        is_by_size = is_thinned and len({arm.arm.num_workers for _, arm in chosen}) > 1
        keys = [str(arm.arm.num_workers) if is_by_size else arm.arm.name for _, arm in chosen]
        colors = colors_of(keys)
        suffix = ", simulated" if len(findings) > 1 else ""
        shown = (
            _Shown(
                finding=arm,
                source=source,
                name=arm.arm.name + (suffix if source is Source.SIMULATED else ""),
                color=colors[key],
            )
            for (source, arm), key in zip(chosen, keys, strict=True)
        )
        return cls(shown=tuple(shown), is_thinned=is_thinned, unit=findings[0].unit if is_by_size else None)

    @property
    def axis(self) -> Axis:
        """Axis of the load."""
        is_wide = max(self.loads) > _WIDE * min(self.loads)
        scale = Scale.LOG if is_wide else Scale.LINEAR
        if self.load_unit is not LoadUnit.REQUESTS:
            return Axis(title=f"load{self.whose}, {self.load_unit}", scale=scale)
        return Axis(title=f"load{self.whose}, requests", unit=Unit.RATE, scale=scale)

    @property
    def load_unit(self) -> LoadUnit:
        """Unit of the loads."""
        return self.shown[0].finding.curve.readings[0].points[0].load_unit

    @property
    def loads(self) -> Sequence[float]:
        """All positions on the axis."""
        return [reading.load / self._divisor(arm) for arm in self.shown for reading in arm.finding.curve.readings]

    @property
    def whose(self) -> str:
        """Suffix of axis titles for divided rates."""
        return "" if self.unit is None else f" for each {self.unit}"

    def curves(self, pick: Callable[[Reading], Estimate | None], *, is_rate: bool = False) -> list[Curve]:
        """Return every arm's curve over the loads with a value; rates are divided like the load."""
        return [self._curve(arm, pick, self._divisor(arm) if is_rate else 1) for arm in self.shown]

    def _divisor(self, arm: _Shown) -> int:
        return 1 if self.unit is None else arm.finding.num_units

    def _curve(self, arm: _Shown, pick: Callable[[Reading], Estimate | None], divisor: int) -> Curve:
        readings = arm.finding.curve.readings
        known = [(reading, found.scaled(1 / divisor)) for reading in readings if (found := pick(reading)) is not None]
        return Curve(
            name=arm.name,
            x=[reading.load / self._divisor(arm) for reading, _ in known],
            y=[estimate.value for _, estimate in known],
            low=[estimate.low for _, estimate in known],
            high=[estimate.high for _, estimate in known],
            color=arm.color,
            symbol=_symbol(arm.finding.arm, arm.source),
            dash="solid" if arm.finding.arm.is_split else "dash",
            texts=[
                f"{reading.points[0].load_text} in all, {count(len(reading.points), 'run')},"
                f" {count(sum(point.overall.num_requests for point in reading.points), 'request')}"
                for reading, _ in known
            ],
        )


def _chosen(findings: Findings) -> Sequence[ArmFinding]:
    if any(point.load_unit is not LoadUnit.REQUESTS for point in findings.points):
        order = [name for name, _ in most_good_sessions(findings.points)]
        return sorted(findings.arms, key=lambda arm: order.index(arm.arm.name))[:_MAX_ARMS]
    if len(findings.arms) <= _MAX_ARMS:
        return findings.arms
    if len({arm.arm.num_workers for arm in findings.arms}) == 1:
        return sorted(findings.arms, key=lambda arm: arm.rank, reverse=True)[:_MAX_ARMS]
    names = {arm.arm.name for arm in findings.best_splits}
    names |= {rival.arm.name for split in findings.best_splits if (rival := findings.rival_of(split)) is not None}
    return [arm for arm in findings.arms if arm.arm.is_external or arm.arm.name in names]


def _symbol(arm: Arm, source: Source) -> str:
    symbol = "diamond" if arm.is_external else "circle" if arm.is_split else "square"
    return symbol if source is Source.REAL else f"{symbol}-open"


# ── over the load ───────────────────────────────────────────────────────────────────────────────────────────────────


def load_panels(sheet: Sheet, *, share: float, slo: Slo | None) -> tuple[Panel, ...]:
    """Return goodput, the share of good requests, and p99 latencies of all requests and of each kind."""
    readings = [reading for arm in sheet.shown for reading in arm.finding.curve.readings]
    kinds = list(dict.fromkeys(kind for reading in readings for kind in reading.kinds))
    kinds = kinds if len(kinds) > 2 else kinds[:1]  # a single kind equals all requests
    ttft_limit = () if slo is None else (LimitLine(value=slo.ttft_s, text="objective, short prompts"),)
    tpot_limit = () if slo is None else (LimitLine(value=slo.tpot_s, text="objective of the mean gap"),)
    panels = [_goodput_panel(sheet), _share_panel(sheet, share)]
    for kind in kinds:
        whose = "all requests" if kind == ALL else kind
        panels += [
            _latency_panel(
                sheet, f"First token, {whose}: p99", methodcaller("latency", kind, "ttft", "p99"), ttft_limit
            ),
            _latency_panel(
                sheet, f"Gap between tokens, {whose}: p99", methodcaller("latency", kind, "itl", "p99"), tpot_limit
            ),
        ]
    return tuple(panels)


def worker_panels(sheet: Sheet) -> tuple[Panel, ...]:
    """Return the utilization of the pools and of their memory, and the cost of moving KV."""
    return (
        _mean_panel(sheet, "Prefill pool: time in steps", lambda point: point.prefill_busy),
        _mean_panel(sheet, "Decode pool: time in steps", lambda point: point.decode_busy),
        _mean_panel(sheet, "KV pages in use, fullest worker", lambda point: point.kv_peak),
        _mean_panel(sheet, "Prompt tokens found in a cache", lambda point: point.token_hit),
        _mean_panel(sheet, "KV moved per request", _moved_bytes, Unit.BYTES),
        _mean_panel(
            sheet, "KV transfer that prefill does not hide, median", attrgetter("transfer_exposed_p50_s"), Unit.SECONDS
        ),
    )


def _goodput_panel(sheet: Sheet) -> Panel:
    rate = Axis(title=f"good requests{sheet.whose}", unit=Unit.RATE, scale=sheet.axis.scale, starts_at_zero=True)
    figure = line_figure(sheet.curves(attrgetter("goodput"), is_rate=True), Frame(x=sheet.axis, y=rate, height=480))
    is_rate = sheet.load_unit is LoadUnit.REQUESTS
    if is_rate:
        ends = compact([min(sheet.loads), max(sheet.loads)])
        line = {"color": GREY, "width": 1, "dash": "dot"}
        figure.add_scatter(x=ends, y=ends, mode="lines", name="all of the load", line=line, hoverinfo="skip")
    return Panel(
        title="Goodput",
        look_for="An arm that serves its load well is on the dotted line." if is_rate else "",
        content=figure,
        note="Complete requests within both objectives. Bands are 95 % intervals. Filled marks: measured; hollow marks:"
        " simulated.",
    )


def _share_panel(sheet: Sheet, share: float) -> Panel:
    frame = Frame(
        x=sheet.axis,
        y=Axis(title="good requests of those that count", unit=Unit.SHARE),
        y_limits=(LimitLine(value=share, text=f"{percent(share, 0)} wanted"),),
    )
    figure = line_figure(sheet.curves(lambda reading: reading.good_share), frame)
    figure.update_yaxes(range=[0, 1.03])
    look_for = "An arm's capacity is where its curve falls through the red line."
    return Panel(title="Share of good requests", look_for=look_for, content=figure)


def _latency_panel(
    sheet: Sheet, title: str, pick: Callable[[Reading], Estimate | None], limits: tuple[LimitLine, ...]
) -> Panel:
    frame = Frame(x=sheet.axis, y=Axis(unit=Unit.SECONDS, scale=Scale.LOG), y_limits=limits, height=340)
    note = "Mean of the runs; bands from the smallest to the largest."
    return _small_panel(title, sheet.curves(pick), frame, note=note)


def _mean_panel(sheet: Sheet, title: str, pick: Callable[[Point], float | None], unit: Unit = Unit.SHARE) -> Panel:
    curves = sheet.curves(lambda reading: _exact(reading.mean_of(pick)))
    return _small_panel(title, curves, Frame(x=sheet.axis, y=Axis(unit=unit, starts_at_zero=True), height=320))


def _small_panel(title: str, curves: Sequence[Curve], frame: Frame, *, note: str = "") -> Panel:
    if not any(len(curve.x) for curve in curves):
        return Panel(title=title, content=Absent(why="not reported"), width=Width.HALF)
    return Panel(title=title, content=line_figure(curves, frame), note=note, width=Width.HALF)


def _moved_bytes(point: Point) -> float | None:
    return point.transfer_bytes / point.overall.num_requests if point.overall.num_requests else None


def _exact(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value=value, low=value, high=value)


# ── by shape ────────────────────────────────────────────────────────────────────────────────────────────────────────


def capacity_panel(findings: Findings) -> Panel:
    """Return each arm's capacity per unit."""
    title = f"Capacity for each {findings.unit}"
    rows = [arm for arm in reversed(findings.arms) if arm.capacity.load]
    if not rows:
        return Panel(title=title, content=Absent(why="no arm served any of its loads"))
    axis = Axis(title=f"requests for each {findings.unit}", unit=Unit.RATE, starts_at_zero=True)
    figure = new_figure(Frame(x=axis, height=120 + _ROW * len(rows)))
    values = [min(arm.capacity.load, arm.capacity.highest) / arm.num_units for arm in rows]
    lows = [arm.capacity.low / arm.num_units for arm in rows]
    highs = [(arm.capacity.highest if arm.capacity.high is None else arm.capacity.high) / arm.num_units for arm in rows]
    colors = [PURPLE if arm.arm.is_external else PALETTE[0] if arm.arm.is_split else GREY for arm in rows]
    figure.add_bar(
        y=[plain(arm.arm.name) for arm in rows],
        x=compact(values),
        orientation="h",
        marker={"color": colors, "opacity": 1.0 if findings.source is Source.REAL else 0.75},
        error_x=whiskers(values, lows, highs),
        text=[plain(str(arm.capacity)) for arm in rows],
        textposition="none",
        hovertemplate=f"<b>%{{y}}</b><br>%{{x:.3r}}/s for each {findings.unit}<br>%{{text}} in all<extra></extra>",
        showlegend=False,
    )
    figure.update_yaxes(type="category", tickformat="", ticksuffix="")
    return Panel(
        title=title,
        look_for="The longest bar serves most; of the splits of a size, which stand together, it has the best ratio."
        f" Grey arms are aggregated. {percent(findings.share, 0)} of the requests were good.",
        content=figure,
        note="Whiskers are 95 % intervals. A bar ends at the highest measured load where that was served; an arm that"
        " served none of its loads has no bar.",
    )


def limit_panel(findings: Findings) -> Panel:
    """Return the limit of each arm at each load."""
    axis = Axis(title=f"load for each {findings.unit}, requests", unit=Unit.RATE, scale=Scale.LOG)
    frame = Frame(x=axis, height=130 + _ROW * len(findings.arms))
    figure = new_figure(frame)
    marks = [
        (arm, reading.load / arm.num_units, diagnose(reading, arm.arm, share=findings.share))
        for arm in findings.arms
        for reading in arm.curve.readings
    ]
    for limit, color in _LIMIT_COLORS.items():
        own = [mark for mark in marks if mark[2].limit is limit]
        if own:
            figure.add_scatter(
                x=compact([place for _, place, _ in own]),
                y=[plain(arm.arm.name) for arm, _, _ in own],
                text=[plain(f"{diagnosis.load:g}/s: {diagnosis.why}") for _, _, diagnosis in own],
                name=limit.value,
                mode="markers",
                marker={"color": color, "size": 13, "symbol": "square"},
                hovertemplate=f"<b>%{{y}}</b>: {limit.value}<br>%{{text}}<extra></extra>",
            )
    names = [plain(arm.arm.name) for arm in reversed(findings.arms)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names, tickformat="", ticksuffix="")
    return Panel(
        title="What gives way first",
        look_for="The load grows from left to right; the first square that is not green shows what is too small.",
        content=figure,
        note="Prefill: first tokens late or requests refused. Decode: gaps too long. KV memory: the same as prefill,"
        " while prefill workers have time left and a decode worker's pages are full.",
    )
