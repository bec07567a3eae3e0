"""Tables of an experiment's page: findings on each arm, and every run."""

import math
import os
from collections.abc import Sequence
from urllib.parse import quote

from measure.experiment.analysis import ArmFinding, Findings
from measure.experiment.points import Cell, Point
from measure.experiment.store import Store
from measure.figures import Percentiles
from measure.pages.page import Panel, Section, Table
from measure.pages.wording import duration, number, percent

_NONE = "–"


def tables_section(findings: Sequence[Findings], store: Store) -> Section:
    """Return the tables; runs link to their own pages, if the store has them."""
    panels = [_arms_table(each) for each in findings]
    return Section(title="All numbers", panels=(*panels, _points_table(findings, store)))


def _arms_table(findings: Findings) -> Panel:
    rows = tuple(
        (
            arm.arm.name,
            _finite(arm.reach.load),
            f"{number(arm.reach.low)} to {'more' if arm.reach.high is None else number(arm.reach.high)}",
            _finite(arm.reach.per_unit),
            _NONE if arm.knee is None else f"{number(arm.knee)}/s",
            f"{number(arm.curve.peak.goodput.value)}/s at {number(arm.curve.peak.load)}/s",
            arm.limit.limit.value,
            _next(arm),
        )
        for arm in findings.arms
    )
    best = {payoff.split.arm.name for payoff in findings.payoffs}
    return Panel(
        title=f"Arms, {findings.source.value}",
        content=Table(
            columns=(
                "arm",
                "serves",
                "95 %",
                f"per {findings.unit}",
                "knee",
                "most goodput",
                "gives way first",
                "next worker",
            ),
            rows=rows,
            text_columns=frozenset(["gives way first", "next worker"]),
            strong_rows=frozenset(index for index, arm in enumerate(findings.arms) if arm.arm.name in best),
        ),
        note="Bold: the best split of its size.",
    )


def _next(arm: ArmFinding) -> str:
    following = arm.next_worker
    if following is None:
        return _NONE
    if not following.pool:
        return "cannot tell"
    return following.pool if following.is_measured else f"{following.pool}, probably"


def _finite(value: float) -> str:
    return f"{number(value)}/s" if 0 < value < math.inf else _NONE


def _points_table(findings: Sequence[Findings], store: Store) -> Panel:
    rows, links = [], []
    for each in findings:
        for arm in each.arms:
            for reading in arm.curve.readings:
                for point in reading.points:
                    rows.append(_point_row(point))
                    links.append(_link(point, store))
    return Panel(
        title="Runs",
        content=Table(
            columns=(
                "arm",
                "source",
                "load /s",
                "run",
                "requests",
                "good",
                "good /s",
                "late",
                "slow",
                "refused",
                "TTFT p50",
                "p99",
                "gap p50",
                "p99 ",
                "prefill busy",
                "decode busy",
                "KV peak",
                "cached",
            ),
            rows=tuple(rows),
            text_columns=frozenset(["source"]),
            links=tuple(links) if any(links) else (),
        ),
        note="Arms link to the pages of their runs, if there are any.",
    )


def _point_row(point: Point) -> tuple[str, ...]:
    overall = point.overall
    return (
        point.arm.name,
        point.source.value,
        f"{point.load:g}",
        str(point.repeat + 1),
        f"{overall.num_requests:,}",
        percent(overall.good_share),
        number(point.goodput_per_s),
        str(overall.num_ttft_misses),
        str(overall.num_itl_misses),
        str(overall.num_not_complete),
        *_times(overall.ttft),
        *_times(overall.itl),
        *(_NONE if share is None else percent(share, 0) for share in (point.prefill_busy, point.decode_busy)),
        _NONE if point.kv_peak is None else percent(point.kv_peak, 0),
        _NONE if point.token_hit is None else percent(point.token_hit, 0),
    )


def _times(latency: Percentiles | None) -> tuple[str, str]:
    return (_NONE, _NONE) if latency is None else (duration(latency.p50), duration(latency.p99))


def _link(point: Point, store: Store) -> str:
    """Return the link from the experiment's page to a run's own page; empty without one."""
    folder = store.folder(point.source, Cell(arm=point.arm.name, load=point.load, repeat=point.repeat))
    page = folder / "report.html"
    return quote(os.path.relpath(page, store.out)) if page.exists() else ""
