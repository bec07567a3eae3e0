"""`kvrelay plan`: what the planner thinks of the pools' sizes, and why."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.console import message_record, show
from cli.options import DEFAULT_CONFIG, ConfigOption, IntervalOption, JsonOption, WatchOption, check_form
from cli.target import running_cluster

if TYPE_CHECKING:
    from kvrelay.v1.controller_pb2 import GetPlanResponse, PlanRecord

_NUM_CHANGES = 10


def plan(
    config_path: ConfigOption = DEFAULT_CONFIG,
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the present and wanted sizes of the pools, the reason, and the changes so far.

    \b
    kvrelay plan
    kvrelay plan --watch
    kvrelay plan --json | jq .latest.terms

    Plans are made with planner.mode: advise or act in serving.yaml; with advise
    nothing is changed.
    """  # noqa: D301 - \b marks a preformatted block
    from cluster.control import read_plan

    check_form(watch=watch, as_json=as_json)
    run_dir = running_cluster(config_path).run_dir
    show(
        lambda: read_plan(run_dir),
        view=plan_view,
        record=message_record,
        watch=watch,
        interval_s=interval_s,
        as_json=as_json,
    )


def plan_view(response: "GetPlanResponse") -> RenderableType:
    """Return the latest plan, its numbers, and the changes before it."""
    head = f"planner: {response.mode}"
    if response.mode == "off":
        return Text(f"{head}; planner.mode: advise or act in serving.yaml makes it plan")
    head += f", every {response.interval_s:g} s"
    if not response.HasField("latest"):
        return Text(f"{head}; no plan yet")
    latest = response.latest
    parts: list[RenderableType] = [
        Text(f"{head}, the last time {latest.age_s:.0f} s ago"),
        Text(_sizes(latest)),
        Text(latest.reason + (f" [{latest.outcome}]" if latest.outcome else "")),
    ]
    if latest.terms:
        numbers = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for term in latest.terms:
            numbers.add_row(term.name, f"{term.value:.4g}")
        parts.append(numbers)
    if response.changes:
        parts.append(_changes(response.changes[:_NUM_CHANGES]))
    return Group(*parts)


def _sizes(record: "PlanRecord") -> str:
    pools = (("prefill", record.prefill), ("decode", record.decode))
    return ", ".join(
        f"{name} {pool.present}" + (f" -> {pool.wanted}" if pool.wanted != pool.present else "") for name, pool in pools
    )


def _changes(records: "list[PlanRecord]") -> Table:
    table = Table("ago", "sizes", "outcome", "why", title="changes", title_justify="left")
    for record in records:
        table.add_row(f"{record.age_s:.0f} s", _sizes(record), Text(record.outcome), Text(record.reason))
    return table
