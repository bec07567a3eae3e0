"""An experiment's page: findings in words, then plots and tables."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.slo import Slo
from measure.experiment.analysis import Findings, analyze
from measure.experiment.answers import agreement, answers_of
from measure.experiment.load_figures import busy_panels, goodput_panel, handoff_panels, latency_panels, share_panel
from measure.experiment.looks import is_thinned
from measure.experiment.payoff import ArmReach, Payoff, Verdict
from measure.experiment.points import MeanUnit, Point
from measure.experiment.shape_figures import grid_panel, limit_panel, ratio_panel, reach_panel
from measure.experiment.spec import CapacitySpec
from measure.experiment.store import Store
from measure.experiment.tables import tables_section
from measure.pages.page import Answers, Card, Page, PageSection, Panel, Tone, write_page
from measure.pages.wording import change, count, duration, number, percent


def write_report(store: Store) -> Path:
    """Write the page of an experiment's folder, report.html, and return its path.

    Equal folders give equal pages. Raises ValueError when there are no points, ExperimentError, OSError.
    """
    points = tuple(store.points())
    if not points:
        raise ValueError(f"{store.out} has no results; run `kvrelay experiment run` into it first")
    capacities = tuple(store.capacities())
    settings = _read(store.out / "settings.json", json.loads)
    file = _read(store.out / "experiment.yaml", yaml.safe_load)
    wanted = CapacitySpec.model_validate(file.get("capacity", {}))
    findings = analyze(points, share=wanted.share, kinds=wanted.kinds, capacities=capacities)
    slo = _slo(settings)
    page = Page(
        title=f"Experiment {file.get('name', store.out.name)}",
        subtitle=_subtitle(points, findings, slo),
        warnings=tuple(_warnings(points, store)),
        verdict=_verdict(findings),
        cards=_cards(findings),
        sections=(
            _words(findings),
            _loads(findings, slo),
            *(_shapes(each) for each in findings),
            PageSection(title="Workers", panels=busy_panels(findings)),
            PageSection(title="Cost of the handoff", panels=handoff_panels(findings)),
            tables_section(findings, store),
        ),
        settings={"experiment": file, "settings": settings},
    )
    path = store.out / "report.html"
    write_page(path, page)
    return path


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in a file; empty if there is none."""
    content = parse(path.read_text(encoding="utf-8")) if path.exists() else None
    return content if isinstance(content, dict) else {}


def _slo(settings: dict[str, Any]) -> Slo | None:
    """Return the stated objectives."""
    found = next((settings[key] for key in ("real slo", "simulated slo") if key in settings), None)
    return None if found is None else Slo(**found)


# ── head of the page ────────────────────────────────────────────────────────────────────────────────────────────────


def _subtitle(points: Sequence[Point], findings: Sequence[Findings], slo: Slo | None) -> str:
    sources = " and ".join(
        f"{count(sum(point.source is each.source for point in points), f'{each.source.value} run')}"
        f" of {count(len(each.arms), 'arm')}"
        for each in findings
    )
    text = f"{sources}. Good: {percent(findings[0].share, 0)} of the requests wanted"
    if findings[0].kinds:
        text += f", of {', '.join(findings[0].kinds)}"
    if slo is not None:
        text += (
            f"; first token within {duration(slo.ttft_s)} per {slo.ttft_tokens:,} prompt tokens,"
            f" mean gap at most {duration(slo.tpot_s)}"
        )
    return text + "."


def _warnings(points: Sequence[Point], store: Store) -> Sequence[str]:
    warned: dict[str, int] = {}
    for point in points:
        for warning in point.warnings:
            warned[warning] = warned.get(warning, 0) + 1
    told = [f"{warning} ({count(times, 'run')})" for warning, times in warned.items()]
    return told + [f"not measured: {failure}" for failure in store.failures()]


def _verdict(findings: Sequence[Findings]) -> tuple[str, ...]:
    """Return the first answer of each source: whether disaggregation pays."""
    said = []
    for each in findings:
        _, first = answers_of(each)[0]
        said.append((f"{each.source.value.capitalize()}: " if len(findings) > 1 else "") + first)
    return tuple(said)


def _cards(findings: Sequence[Findings]) -> tuple[Card, ...]:
    each = findings[0]
    cards = []
    if each.payoffs:
        payoff = max(each.payoffs, key=lambda payoff: payoff.num_workers)
        cards += [_reach_card(payoff.split), _reach_card(payoff.whole)]
        if payoff.ratio is not None:
            cards.append(_payoff_card(payoff))
    if each.unit is not MeanUnit.ARM and all(arm.reach.load < math.inf for arm in each.arms):
        best = max(each.arms, key=lambda arm: arm.reach.per_unit)
        cards.append(
            Card(label=f"Most for each {each.unit}", value=f"{number(best.reach.per_unit)}/s", note=best.arm.name)
        )
    if each.balance is not None:
        cards.append(
            Card(
                label="Balanced share of prefill workers",
                value=percent(each.balance.prefill_share, 0),
                note="both pools give way at once",
            )
        )
    return tuple(cards)


def _reach_card(arm: ArmReach) -> Card:
    reach = arm.reach
    if not reach.load:
        return Card(label=f"{arm.arm.name} serves", value="no load that was tried")
    value = f"{number(reach.load)}/s" if reach.is_bracketed else f"> {number(reach.highest)}/s"
    low = number(reach.low)
    note = f"95 %: at least {low}" if reach.high is None else f"95 %: {low} to {number(reach.high)}"
    return Card(label=f"{arm.arm.name} serves", value=value, note=note)


def _payoff_card(payoff: Payoff) -> Card:
    assert payoff.ratio is not None
    value, low, high = (change(each) for each in (payoff.ratio.value, payoff.ratio.low, payoff.ratio.high))
    tones = {Verdict.MORE: Tone.GOOD, Verdict.LESS: Tone.BAD, Verdict.UNCLEAR: Tone.PLAIN}
    return Card(
        label=f"Disaggregation, {count(payoff.num_workers, 'worker')}",
        value=value,
        note=f"95 %: {low} to {high}",
        tone=tones[payoff.verdict],
    )


# ── sections ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _words(findings: Sequence[Findings]) -> PageSection:
    panels = [
        Panel(
            title=f"What the {each.source.value} arms say" if len(findings) > 1 else "",
            content=Answers(pairs=answers_of(each)),
        )
        for each in findings
    ]
    compared = tuple(agreement(findings))
    if compared:
        panels.append(Panel(title="Both together", content=Answers(pairs=compared)))
    return PageSection(
        title="Findings",
        intro="An arm serves a load when enough of its requests are good. One arm is called better than another when"
        f" 95 % of the random draws agree. {_told_dispersion(findings)}",
        panels=tuple(panels),
    )


def _told_dispersion(findings: Sequence[Findings]) -> str:
    """Return the assumption behind the intervals, in words."""
    parts = [
        f"{each.source.value} runs of one load differ {number(dispersion, 2)} times as much"
        for each in findings
        if (dispersion := each.arms[0].curve.dispersion) > 1
    ]
    if parts:
        return f"Intervals are widened, since {' and '.join(parts)} as independent requests would."
    return "Intervals assume independent requests: the true uncertainty is larger."


def _loads(findings: Sequence[Findings], slo: Slo | None) -> PageSection:
    thinned = "For each number of workers the best split and the best aggregated arm are shown; the table has all. "
    return PageSection(
        title="As the load grows",
        intro=thinned if is_thinned(findings) else "",
        panels=(goodput_panel(findings), share_panel(findings), *latency_panels(findings, slo)),
    )


def _shapes(findings: Findings) -> PageSection:
    source = findings.source.value
    panels = [reach_panel(findings), limit_panel(findings)]
    if sum(arm.arm.num_prefill > 0 for arm in findings.arms) > 1:
        panels[1:1] = [ratio_panel(findings), grid_panel(findings)]
    return PageSection(title=f"Shapes, {source}", panels=tuple(panels))
