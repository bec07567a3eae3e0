"""`kvrelay bench report` and `kvrelay bench compare`: judge finished runs again, and compare them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.bench_measure import COMPARISON_FILE, earlier_objectives, judge, show
from cli.bench_options import CheckOption, Criteria, Output, output, served_objectives
from cli.console import err, print_wide
from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption, options_from_dataclasses


@options_from_dataclasses
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of `kvrelay bench run`.")],
    *,
    config_path: ConfigOption = DEFAULT_CONFIG,
    criteria: Criteria,
    check: CheckOption = None,
    shown: Output,
) -> None:
    """Judge a finished run again: other objectives, another warm-up.

    \b
    kvrelay bench report bench-results/rate-4-20260101-120000 --ttft 1
    kvrelay bench report DIR --warm-up 20 --json | jq .kinds[0].good_share

    Writes summary.json and report.html in DIR again; the requests stay as they are.
    Objectives that are not given are those of the last judgement.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.store import read_run

    defaults = earlier_objectives(folder) or served_objectives(config_path)
    show(read_run(folder), criteria.judgement(defaults, check), folder, shown)


@options_from_dataclasses
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="A B …", help="Results; the others are compared with the first.")
    ],
    *,
    config_path: ConfigOption = DEFAULT_CONFIG,
    criteria: Criteria,
    out: Annotated[
        Path | None,
        output(
            "--out",
            "-o",
            metavar="FILE.html",
            help="The page of overlaid plots; default: comparison.html in the last of the folders.",
            show_default=False,
        ),
    ] = None,
    shown: Output,
) -> None:
    """Put runs side by side and separate differences from chance.

    \b
    kvrelay bench compare bench-results/before bench-results/after
    kvrelay bench compare kvrelay vllm --ttft 1 --out side-by-side.html

    All are judged by the same objectives, by default those of the first run. Runs of the same workload and seed are
    compared request by request, which finds smaller differences.
    """  # noqa: D301 - \b marks a preformatted block
    from measure.load.comparison import compare as compare_runs
    from measure.load.comparison_table import comparison_view
    from measure.load.store import read_run

    if len(folders) < 2:
        raise CliError("compare takes two or more folders of results")
    defaults = earlier_objectives(folders[0]) or served_objectives(config_path)
    judgement = criteria.judgement(defaults)
    runs = [read_run(folder) for folder in folders]
    names = _names(folders, [run.info.name for run in runs])
    runs = [
        dataclasses.replace(run, info=dataclasses.replace(run.info, name=name))
        for run, name in zip(runs, names, strict=True)
    ]
    summaries = [judge(run, judgement) for run in runs]
    comparison = compare_runs(runs, summaries)
    if shown.with_report:
        from measure.load.report.comparison import write_comparison

        page = out or folders[-1] / COMPARISON_FILE
        page.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(list(zip(runs, summaries, strict=True)), page)
        err.print(f"The page is {page}", soft_wrap=True)
    if shown.as_json:
        typer.echo(json.dumps({"names": names} | dataclasses.asdict(comparison), ensure_ascii=False, indent=1))
    else:
        print_wide(comparison_view(comparison, names))


def _names(folders: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Return names for the runs: their own where these differ, else those of their folders, else numbered ones."""
    for candidates in (list(names), [folder.resolve().name for folder in folders]):
        if len(set(candidates)) == len(candidates):
            return candidates
    return [f"{name} {number}" for number, name in enumerate(names, start=1)]
