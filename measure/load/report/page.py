"""The page of one load test."""

from dataclasses import asdict
from pathlib import Path

from measure.load.records import Run
from measure.load.report import asked, gantt, handoff, headline, latency, pools
from measure.load.report.columns import columns_of
from measure.load.summary import Summary
from measure.pages.page import Page, Section, write_page
from measure.pages.wording import count, duration


def write_report(run: Run, summary: Summary, path: Path) -> None:
    """Write the page of a run. Equal runs give equal bytes. Raises OSError."""
    write_page(path, report_page(run, summary))


def report_page(run: Run, summary: Summary) -> Page:
    """Return the page of a run. Panels without data give the reason."""
    columns = columns_of(run, summary.window)
    workers = pools.series_of(run.samples)
    return Page(
        title=run.info.name,
        subtitle=_subtitle(run),
        warnings=tuple(dict.fromkeys((*summary.warnings, *run.info.generator.warnings))),
        cards=headline.cards(summary),
        sections=(
            Section(title="Overview", panels=(headline.kinds_panel(summary), asked.failures_panel(summary))),
            Section(
                title="Latency",
                intro="From the due time of a request, so that a late generator hides no wait.",
                panels=(
                    *latency.distribution_panels(columns, summary.slo),
                    latency.prompt_length_panel(columns, summary.slo),
                ),
            ),
            Section(
                title="Over time",
                panels=latency.over_time_panels(columns, summary.slo, summary.window, run.samples),
            ),
            Section(title="Requests", panels=(gantt.gantt_panel(columns, summary.slo),)),
            Section(title="Handoff", panels=handoff.handoff_panels(columns)),
            Section(title="Pools", panels=pools.pool_panels(workers, summary)),
            Section(title="Caches", panels=asked.cache_panels(columns)),
            Section(title="Requests sent", panels=asked.asked_panels(columns)),
        ),
        settings=asdict(run.info),
    )


def _subtitle(run: Run) -> str:
    info = run.info
    workers = ", ".join(f"{number} {role}" for role, number in info.num_workers.items())
    labels = ", ".join(f"{name} {value}" for name, value in info.labels.items())
    parts = (
        f"{info.system} serving {info.model}",
        info.target,
        workers,
        labels,
        f"{count(len(run.requests), 'request')} in {duration(info.duration_s)}",
        info.started_at,
    )
    return " · ".join(part for part in parts if part)
