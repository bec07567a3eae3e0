"""`kvrelay changes` and `kvrelay cancel`: what changes the running cluster, and how to stop that."""

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cli.console import Progress, err, message_record, out, show
from cli.options import DEFAULT_CONFIG, ConfigOption, IntervalOption, JsonOption, WatchOption, check_form
from cli.target import running_cluster

if TYPE_CHECKING:
    from cluster.control import ChangeStep
    from kvrelay.v1.controller_pb2 import ChangeRecord, ListChangesResponse

_NUM_SHOWN = 20


def changes(
    config_path: ConfigOption = DEFAULT_CONFIG,
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the changes of the cluster that run, wait or have lately ended.

    \b
    kvrelay changes
    kvrelay changes --json | jq '.changes[0].state'

    Changes are made by scale, restart, rollout and the planner. Those that touch
    the same pool run one after the other.
    """  # noqa: D301 - \b marks a preformatted block
    from cluster.control import read_changes

    check_form(watch=watch, as_json=as_json)
    run_dir = running_cluster(config_path).run_dir
    show(
        lambda: read_changes(run_dir),
        view=changes_view,
        record=message_record,
        watch=watch,
        interval_s=interval_s,
        as_json=as_json,
    )


def cancel(
    change_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="The change, as in `kvrelay changes`.")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Cancel a change that runs or waits, and return when it has ended.

    A cancelled scale ends where it is: workers that are not in use yet are
    removed, those that drain get requests again, the others stay. A cancelled
    rollout or restart goes back to the old workers.
    """
    from cluster.control import cancel as ask

    info = running_cluster(config_path)
    last = ""
    with Progress() as report:
        for step in ask(info.run_dir, change_id):
            if last:
                report(last)
            last = step.text
    out.print(last, soft_wrap=True)


def show_steps(steps: "Iterable[ChangeStep]", report: Progress) -> None:
    """Report the steps of a change. Ctrl-C ends that, not the change, and says so."""
    change_id = 0
    try:
        for step in steps:
            change_id = step.change_id
            report(step.text)
    except KeyboardInterrupt:
        if change_id:
            err.print(f"\nchange {change_id} goes on; `kvrelay cancel {change_id}` cancels it", soft_wrap=True)
        else:
            err.print("\nthe change goes on; `kvrelay changes` shows it", soft_wrap=True)
        raise


def changes_view(response: "ListChangesResponse") -> RenderableType:
    """Return a table of the changes, newest first."""
    if not response.changes:
        return Text("nothing has changed since the supervisor started")
    table = Table("id", "change", "state", "begun", "took", "latest")
    for record in response.changes[:_NUM_SHOWN]:
        begun = datetime.fromtimestamp(record.begun_unix_s).astimezone()
        table.add_row(
            str(record.id),
            f"{record.kind} {record.description}",
            _state(record),
            f"{begun:%H:%M:%S}",
            f"{record.took_s:.0f} s",
            Text((record.error or record.latest_step).partition("\n")[0]),
        )
    return table


def _state(record: "ChangeRecord") -> str:
    behind = f", after {', '.join(map(str, record.waits_for))}" if record.waits_for else ""
    return record.state + behind
