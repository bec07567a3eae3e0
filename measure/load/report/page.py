"""The page of one load test, or of several beside each other."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measure.load.comparison import RunComparison, comparison_table, verdicts
from measure.load.records import Run
from measure.load.report.columns import Arm, arms_of, series_of
from measure.load.report.latency import distribution_panels, over_time_panels, prompt_length_panel
from measure.load.report.phases import cache_panel, phase_panels, transfer_panel
from measure.load.report.pools import pool_panels
from measure.load.summary import Summary
from measure.load.tables import all_cards, failure_table, latency_table, objectives, share_table
from measure.pages.page import Absent, Page, PageSection, Panel, write_page
from measure.pages.wording import count, duration


def write_report(run: Run, summary: Summary, path: Path) -> None:
    """Write the page of a run. Equal runs give equal bytes. Raises OSError."""
    write_page(path, report_page(run, summary))


def write_comparison(runs: Sequence[Run], comparison: RunComparison, path: Path) -> None:
    """Write the page of two or more runs with different names, compared with the first. Raises OSError."""
    write_page(path, comparison_page(runs, comparison))


def report_page(run: Run, summary: Summary) -> Page:
    """Return the page of a run. Panels without data give the reason."""
    arms = arms_of([run], [summary])
    series = tuple(series_of(arms))
    return Page(
        title=run.info.name,
        subtitle=_subtitle(run),
        warnings=_warnings(arms[0]),
        cards=tuple(all_cards(summary)),
        sections=(
            PageSection(title="Overview", panels=_overview(summary)),
            PageSection(
                title="Latency",
                intro="From the due time of a request, so that a late generator hides no wait.",
                panels=(*distribution_panels(arms, series), prompt_length_panel(arms[0])),
            ),
            PageSection(title="Over time", panels=tuple(over_time_panels(arms, series))),
            PageSection(
                title="Where the time goes", panels=(*phase_panels(arms), transfer_panel(arms[0]), cache_panel(arms[0]))
            ),
            PageSection(title="Pools", panels=tuple(pool_panels(run.samples, summary))),
        ),
        settings=asdict(run.info),
    )


def comparison_page(runs: Sequence[Run], comparison: RunComparison) -> Page:
    """Return the page of two or more runs, whose names differ."""
    arms = arms_of(runs, comparison.summaries)
    series = tuple(series_of(arms))
    names = [run.info.name for run in runs]
    table = Panel(
        title="Side by side",
        look_for="Rows in bold differ by more than equal systems would in 19 of 20 cases.",
        content=comparison_table(comparison, names),
        note=f"{comparison.pairing(names)} Intervals (95 %) cover the variation within these runs, not between runs at"
        " different times.",
    )
    return Page(
        title=" against ".join([*names[1:], names[0]]) if len(names) == 2 else f"{len(names)} runs side by side",
        subtitle=" · ".join(f"{run.info.name}: {run.info.system}, {run.info.target}" for run in runs),
        verdict=tuple(verdicts(comparison, names)),
        warnings=tuple(f"{arm.run.info.name}: {warning}" for arm in arms for warning in _warnings(arm)),
        sections=(
            PageSection(title="Overview", panels=(table,)),
            PageSection(title="Latency", panels=tuple(distribution_panels(arms, series))),
            PageSection(title="Over time", panels=tuple(over_time_panels(arms, series))),
            PageSection(title="Where the time goes", panels=tuple(phase_panels(arms))),
        ),
        settings={run.info.name: asdict(run.info) for run in runs},
    )


def _overview(summary: Summary) -> tuple[Panel, ...]:
    return (
        Panel(
            title="What each kind of session got",
            look_for="Refusals mean that the load is too high; failures mean a defect.",
            content=share_table(summary),
            note=f"Counted: {summary.window.rule}.",
        ),
        Panel(
            title="Latencies",
            look_for="A kind whose p99 is far from its p50 pays for other kinds.",
            content=latency_table(summary),
            note="Of complete requests, from when they were due. ~: too few requests for this percentile.",
        ),
        Panel(
            title="Failures by reason",
            look_for="Messages that differ only in ids and numbers are counted together.",
            content=failure_table(summary)
            if summary.failures
            else Absent(why="every counted request was answered completely"),
        ),
    )


def _warnings(arm: Arm) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*arm.summary.warnings, *arm.run.info.generator.warnings)))


def _subtitle(run: Run) -> str:
    info = run.info
    parts = (
        f"{info.system} serving {info.model}",
        info.target,
        ", ".join(f"{number} {role}" for role, number in info.num_workers.items()),
        ", ".join(f"{name} {value}" for name, value in info.labels.items()),
        "" if info.told_slo is None else f"told the server: {objectives(info.told_slo)}",
        f"{count(len(run.requests), 'request')} in {duration(info.duration_s)}",
        info.started_at,
    )
    return " · ".join(part for part in parts if part)
