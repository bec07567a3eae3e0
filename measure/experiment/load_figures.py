"""Plots over the load: goodput, latencies, and utilization of the workers.

Clusters of very different sizes are compared by the load per worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from common.slo import Slo
from measure.experiment.analysis import Findings
from measure.experiment.curves import Reading
from measure.experiment.looks import Shown, shown_arms
from measure.experiment.points import MeanUnit, Point
from measure.figures import ALL, Figures, Percentiles
from measure.load.estimates import Estimate
from measure.pages.axes import Axis, Scale, Unit
from measure.pages.figures import Curve, Frame, LimitLine, compact, line_figure
from measure.pages.page import Absent, Panel, Width
from measure.pages.theme import GREY
from measure.pages.wording import count, percent

_WIDE = 8.0
"""Factor between loads above which their axis is logarithmic."""
_MANY_SIZES = 3
"""Number of cluster sizes above which arms are compared by the load per worker."""
_MAX_NAMES = 8
"""Number of curves above which small plots have no legend."""
_AS_ABOVE = "Colours are those of the first plot."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sheet:
    """Curves of an experiment, and their common axis."""

    shown: tuple[Shown, ...]
    unit: MeanUnit | None
    """Unit that rates are divided by; None: they are not divided."""

    @classmethod
    def of(cls, findings: Sequence[Findings]) -> Self:
        """Return a sheet of all shown arms."""
        shown = shown_arms(findings)
        sizes = {arm.finding.reach.num_units for arm in shown}
        return cls(shown=shown, unit=findings[0].unit if len(sizes) > _MANY_SIZES else None)

    def only_splits(self) -> "_Sheet":
        """Return the sheet without aggregated arms."""
        splits = tuple(arm for arm in self.shown if arm.finding.arm.num_prefill)
        return _Sheet(shown=splits, unit=self.unit)

    @property
    def loads(self) -> Sequence[float]:
        """All positions on the axis."""
        return [reading.load / self.divisor(arm) for arm in self.shown for reading in arm.finding.curve.readings]

    @property
    def is_crowded(self) -> bool:
        """Whether the legend is too long for a small plot."""
        return len(self.shown) > _MAX_NAMES

    @property
    def axis(self) -> Axis:
        """Axis of the load."""
        is_wide = bool(self.loads) and max(self.loads) > _WIDE * min(self.loads)
        return Axis(title=f"load{self.whose}, requests", unit=Unit.RATE, scale=Scale.LOG if is_wide else Scale.LINEAR)

    @property
    def whose(self) -> str:
        """Suffix of axis titles for divided rates."""
        return "" if self.unit is None else f" for each {self.unit}"

    def divisor(self, arm: Shown) -> int:
        """Return the divisor of an arm's rates."""
        return 1 if self.unit is None else arm.finding.reach.num_units

    def rates(self, pick: Callable[[Reading], Estimate]) -> list[Curve]:
        """Return every arm's curve of a rate, divided like the load."""
        return [self._curve(arm, pick, divisor=self.divisor(arm)) for arm in self.shown]

    def curves(self, pick: Callable[[Reading], Estimate | None]) -> list[Curve]:
        """Return every arm's curve over the loads with a value."""
        return [self._curve(arm, pick) for arm in self.shown]

    def _curve(self, arm: Shown, pick: Callable[[Reading], Estimate | None], *, divisor: int = 1) -> Curve:
        readings = arm.finding.curve.readings
        known = [(reading, found.scaled(1 / divisor)) for reading in readings if (found := pick(reading)) is not None]
        return Curve(
            name=arm.name,
            x=[reading.load / self.divisor(arm) for reading, _ in known],
            y=[estimate.value for _, estimate in known],
            low=[estimate.low for _, estimate in known],
            high=[estimate.high for _, estimate in known],
            color=arm.color,
            symbol=arm.symbol,
            dash=arm.dash,
            texts=[
                f"{reading.load:g}/s in all, {count(len(reading.points), 'run')},"
                f" {count(reading.num_requests, 'request')}"
                for reading, _ in known
            ],
        )


def goodput_panel(findings: Sequence[Findings]) -> Panel:
    """Return good requests per second against the load."""
    sheet = _Sheet.of(findings)
    rate = Axis(title=f"good requests{sheet.whose}", unit=Unit.RATE, scale=sheet.axis.scale, starts_at_zero=True)
    curves = sheet.rates(lambda reading: reading.goodput)
    figure = line_figure(curves, Frame(x=sheet.axis, y=rate, height=480))
    ends = compact([min(sheet.loads), max(sheet.loads)])
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        name="all of the load",
        line={"color": GREY, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    return Panel(
        title="Goodput",
        look_for="An arm that serves its load well is on the dotted line; where its curve leaves the line is its knee.",
        content=figure,
        note="Complete requests within both objectives. Bands are 95 % intervals. Filled marks: measured; hollow marks:"
        " simulated.",
    )


def share_panel(findings: Sequence[Findings]) -> Panel:
    """Return the share of good requests against the load, with the wanted share."""
    sheet, share = _Sheet.of(findings), findings[0].share
    frame = Frame(
        x=sheet.axis,
        y=Axis(title="good requests of all", unit=Unit.SHARE),
        y_limits=(LimitLine(value=share, text=f"{percent(share, 0)} wanted"),),
    )
    figure = line_figure(sheet.curves(lambda reading: reading.good_share), frame)
    figure.update_yaxes(range=[0, 1.03])
    return Panel(
        title="Share of good requests",
        look_for="An arm's capacity is where its curve falls through the red line.",
        content=figure,
    )


def latency_panels(findings: Sequence[Findings], slo: Slo | None) -> tuple[Panel, ...]:
    """Return p99 of first tokens and of gaps against the load, of all requests and of each kind."""
    sheet = _Sheet.of(findings)
    readings = [reading for arm in sheet.shown for reading in arm.finding.curve.readings]
    kinds = list(dict.fromkeys(kind for reading in readings for kind in reading.kinds))
    kinds = kinds if len(kinds) > 2 else kinds[:1]  # a single kind equals all requests
    ttft_limit = () if slo is None else (LimitLine(value=slo.ttft_s, text="objective, short prompts"),)
    tpot_limit = () if slo is None else (LimitLine(value=slo.tpot_s, text="objective of the mean gap"),)
    panels = []
    for kind in kinds:
        whose = "all requests" if kind == ALL else kind
        panels += [
            _latency_panel(sheet, kind, attrgetter("ttft"), f"First token, {whose}: p99", ttft_limit),
            _latency_panel(sheet, kind, attrgetter("itl"), f"Gap between tokens, {whose}: p99", tpot_limit),
        ]
    return tuple(panels)


def busy_panels(findings: Sequence[Findings]) -> tuple[Panel, ...]:
    """Return the utilization of the pools, and of their memory."""
    sheet = _Sheet.of(findings)
    shown = (
        ("prefill_busy", "Prefill pool: time in steps", "Above nine tenths, prompts wait for each other."),
        (
            "decode_busy",
            "Decode pool: time in steps",
            "A decode worker steps while it has one answer to write: busy does not mean full.",
        ),
        ("kv_peak", "KV pages in use, fullest worker", "At 100 %, answers wait for pages."),
        ("token_hit", "Prompt tokens found in a cache", "These tokens are not computed."),
    )
    return tuple(_mean_panel(sheet, attrgetter(name), title, look_for) for name, title, look_for in shown)


def handoff_panels(findings: Sequence[Findings]) -> tuple[Panel, ...]:
    """Return the cost of moving KV."""
    sheet = _Sheet.of(findings).only_splits()
    exposed = _mean_panel(
        sheet,
        attrgetter("transfer_exposed_p50_s"),
        "Time that prefill does not hide, median",
        "Delay of the first token because KV moves.",
        unit=Unit.SECONDS,
    )
    moved = _mean_panel(
        sheet,
        lambda point: point.transfer_bytes / point.overall.num_requests if point.overall.num_requests else None,
        "KV moved per request",
        "KV that is cached at the decode worker does not move.",
        unit=Unit.BYTES,
    )
    return exposed, moved


def _mean_panel(
    sheet: _Sheet, pick: Callable[[Point], float | None], title: str, look_for: str, *, unit: Unit = Unit.SHARE
) -> Panel:
    curves = sheet.curves(lambda reading: _exact(reading.mean_of(pick)))
    if not any(len(curve.x) for curve in curves):
        return Panel(title=title, content=Absent(why="not reported"), width=Width.HALF)
    figure = line_figure(curves, Frame(x=sheet.axis, y=Axis(unit=unit, starts_at_zero=True), height=320))
    if unit is Unit.SHARE:
        figure.update_yaxes(range=[0, 1.03])
    note = _AS_ABOVE if sheet.is_crowded else ""
    return Panel(title=title, look_for=look_for, content=_small(figure, sheet), note=note, width=Width.HALF)


def _latency_panel(
    sheet: _Sheet,
    kind: str,
    pick: Callable[[Figures], Percentiles | None],
    title: str,
    limits: tuple[LimitLine, ...],
) -> Panel:
    curves = sheet.curves(lambda reading: reading.p99(kind, pick))
    if not any(len(curve.x) for curve in curves):
        return Panel(title=title, content=Absent(why="nothing was answered"), width=Width.HALF)
    frame = Frame(x=sheet.axis, y=Axis(unit=Unit.SECONDS, scale=Scale.LOG), y_limits=limits, height=340)
    return Panel(
        title=title,
        content=_small(line_figure(curves, frame), sheet),
        note="Mean of the runs; bands from the smallest to the largest."
        + (f" {_AS_ABOVE}" if sheet.is_crowded else ""),
        width=Width.HALF,
    )


def _small(figure: Any, sheet: _Sheet) -> Any:
    """Return a figure, without its legend if that is too long. Mutates it."""
    if sheet.is_crowded:
        figure.update_layout(showlegend=False)
    return figure


def _exact(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value=value, low=value, high=value)
