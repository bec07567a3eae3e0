"""An experiment's page: a paragraph that says what was found, then plots and tables."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from common.slo import Slo
from measure.experiment.analysis import Findings, Gain, Limit, Verdict, analyze
from measure.experiment.figures import Sheet, capacity_panel, limit_panel, load_panels, worker_panels
from measure.experiment.points import MeanUnit
from measure.experiment.session_page import session_panels, verdict_of
from measure.experiment.spec import CapacitySpec
from measure.experiment.store import Store
from measure.experiment.tables import arms_panel, gain_text, runs_panel
from measure.load.tables import objectives
from measure.pages.page import Page, PageSection, write_page
from measure.pages.wording import count, percent, rate

_OUTCOMES = {
    Verdict.MORE: "disaggregation pays",
    Verdict.LESS: "disaggregation loses",
    Verdict.UNCLEAR: "one cannot tell whether disaggregation pays",
}


def findings_of(store: Store) -> tuple[Findings, ...]:
    """Return what the kept points say, real ones first; empty without any. Raises ExperimentError, OSError."""
    wanted = CapacitySpec.model_validate(_file(store).get("capacity", {}))
    return analyze(store.points(), share=wanted.share, kinds=wanted.kinds)


def write_report(store: Store, findings: Sequence[Findings]) -> Path:
    """Write the page of an experiment's folder, report.html, and return its path.

    Equal folders give equal pages. At least one source has findings. Raises ExperimentError, OSError.
    """
    settings = _read(store.out / "settings.json", json.loads)
    stated = next((settings[key] for key in ("real slo", "simulated slo") if key in settings), None)
    slo = None if stated is None else Slo(**stated)
    sheet, file = Sheet.of(findings), _file(store)
    thinned = "The best arms of each size are shown; the table has all."
    points = [point for each in findings for point in each.points]
    played = [point for point in points if point.sessions is not None]
    sessions = (PageSection(title="Sessions", panels=session_panels(played)),) if played else ()
    of_sessions = verdict_of(played)
    is_rate = not of_sessions
    page = Page(
        title=f"Experiment {file.get('name', store.out.name)}",
        subtitle=_subtitle(findings, slo, file.get("capacity", {}).get("kinds", [])),
        warnings=_warnings(store),
        verdict=of_sessions
        or tuple(
            (f"{each.source.value.capitalize()}: " if len(findings) > 1 else "") + summary_text(each)
            for each in findings
        ),
        sections=(
            *sessions,
            PageSection(
                title="As the load grows",
                intro=thinned if sheet.is_thinned else "",
                panels=load_panels(sheet, share=findings[0].share, slo=slo),
            ),
            *(
                PageSection(title=f"Shapes, {each.source}", panels=(capacity_panel(each), limit_panel(each)))
                for each in (findings if is_rate else ())
            ),
            PageSection(title="Workers and their KV", panels=worker_panels(sheet)),
            PageSection(
                title="All numbers",
                intro="Intervals assume independent requests, and are widened by how much runs of one load differ.",
                panels=(*map(arms_panel, findings if is_rate else ()), runs_panel(findings, store)),
            ),
        ),
        settings={"experiment": file, "settings": settings},
    )
    path = store.out / "report.html"
    write_page(path, page)
    return path


def summary_text(findings: Findings) -> str:
    """Return what was found, in a paragraph: the best arm, whether a split pays, and what gives way first."""
    best, wanted = findings.best, f"{percent(findings.share, 0)} good requests"
    if not best.capacity.load:
        return f"No arm served any of its loads with {wanted}."
    whose = "" if findings.unit is MeanUnit.ARM else f" for each {findings.unit}"
    text = f"{best.arm.name} serves most{whose}: {best.capacity} in all, with {wanted}"
    alike = [arm.arm.name for arm in findings.arms if arm is not best and Gain.of(best, arm).verdict is Verdict.UNCLEAR]
    text += f"; not surely more than {', '.join(alike)}." if alike else "."
    split = max(findings.best_splits, key=lambda arm: arm.rank, default=None)
    rival = None if split is None else findings.rival_of(split)
    if split is not None and rival is not None:
        gain = Gain.of(split, rival)
        others = " and ".join(f"{arm.arm.name} serves {arm.capacity}" for arm in (split, rival) if arm is not best)
        by_how_much = f"the split's gain is {gain_text(gain)}, " if gain.ratio is not None else ""
        text += f" {others}: {by_how_much}{_OUTCOMES[gain.verdict]}."
    limit = best.limit
    if limit.limit is not Limit.NOTHING:
        text += f" First to give way in {best.arm.name}: {limit.limit}; at {rate(limit.load)} {limit.why}."
    return text


def _subtitle(findings: Sequence[Findings], slo: Slo | None, kinds: Sequence[str]) -> str:
    sources = " and ".join(
        f"{count(len(list(each.points)), f'{each.source} run')} of {count(len(each.arms), 'arm')}" for each in findings
    )
    text = f"{sources}. Good: {percent(findings[0].share, 0)} of the requests wanted"
    if kinds:
        text += f", of {', '.join(kinds)}"
    return text + ("." if slo is None else f"; {objectives(slo)}.")


def _warnings(store: Store) -> tuple[str, ...]:
    warned = Counter(warning for point in store.points() for warning in point.warnings)
    warnings = [f"{warning} ({count(times, 'run')})" for warning, times in warned.items()]
    return (*warnings, *(f"not measured: {failure}" for failure in store.failures()))


def _file(store: Store) -> dict[str, Any]:
    """Return the experiment's file."""
    return _read(store.out / "experiment.yaml", yaml.safe_load)


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in a file; empty if there is none."""
    content = parse(path.read_text(encoding="utf-8")) if path.exists() else None
    return content if isinstance(content, dict) else {}
