"""`kvrelay why`."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import typer

from cli.console import out, print_wide
from cli.options import JsonOption, options_from_dataclasses
from cli.render import SplitTable, seconds
from cli.target import ConnectionOptions
from kvrelay.client import Diagnosis, PoolWalls, TenantWaits

_TIMEOUT_S = 10.0
_SHARES = ("busy", "memory", "compute", "link", "overhead", "waiting")


@options_from_dataclasses
def why(
    *,
    connection: ConnectionOptions,
    request_id: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="One request of the last hour, instead of all.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Only what concerns this pool: prefill or decode.")] = None,
    window_s: Annotated[
        float,
        typer.Option(
            "--window",
            metavar="SECONDS",
            min=1,
            max=3600,
            help="How far to look back at requests; pools are known for the last 1, 5 and 60 minutes, and judged by the"
            " shortest of these that covers it.",
        ),
    ] = 300,
    as_json: JsonOption = False,
) -> None:
    """Show what has cost recent answers time, and which changes would help.

    \b
    kvrelay why                      faults first, then what costs most
    kvrelay why --window 60 --pool decode
    kvrelay why --request req-…      the parts of one request's time, beside the usual ones
    """  # noqa: D301 - \b marks a preformatted block
    if pool not in (None, "prefill", "decode"):
        raise typer.BadParameter(f"{pool!r} is not a pool; say prefill or decode", param_hint="--pool")
    if pool is not None and request_id is not None:
        raise typer.BadParameter("the parts of one request's time belong to no pool", param_hint="--pool")
    with connection.client(timeout_s=_TIMEOUT_S) as client:
        diagnosis = client.diagnose(window_s=window_s, request_id=request_id)
    if pool is not None:
        findings = tuple(each for each in diagnosis.findings if each.pool == pool)
        walls = tuple(each for each in diagnosis.walls if each.pool == pool)
        diagnosis = dataclasses.replace(diagnosis, findings=findings, walls=walls)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(diagnosis), indent=2))
    else:
        _print(diagnosis)


def _print(diagnosis: Diagnosis) -> None:
    out.print(diagnosis.headline, soft_wrap=True)
    if diagnosis.waiting:
        out.print(diagnosis.waiting, soft_wrap=True)
    if len(diagnosis.tenants) > 1:
        print_wide(_tenants_table(diagnosis.tenants))
    if diagnosis.walls:
        print_wide(_walls_table(diagnosis.walls))
    for number, finding in enumerate(diagnosis.findings, start=1):
        cause = f"{finding.cause} ({finding.lost_s:.2g} s a request): " if finding.cause else ""
        out.print(f"{number}. {cause}{finding.text}", soft_wrap=True)
        for change in finding.changes:
            out.print(f"   - {change}", soft_wrap=True)
    if not diagnosis.findings:
        out.print("nothing costs much time")


def _tenants_table(tenants: Sequence[TenantWaits]) -> SplitTable:
    """Return a row for each tenant: its requests that wait now, and those that were answered after a wait."""
    rows = [
        [
            each.tenant,
            each.mostly_for,
            str(each.num_waiting),
            seconds(each.longest_wait_s),
            str(each.num_answered),
            seconds(each.mean_wait_s),
        ]
        for each in tenants
    ]
    return SplitTable(("tenant", "waits mostly for", "now", "longest", "answered", "mean wait"), rows, num_left=2)


def _walls_table(walls: Sequence[PoolWalls]) -> SplitTable:
    """Return a row for each pool and window: the shares of its workers' time, and the largest part."""
    rows = [
        [
            each.pool,
            f"{each.window_s / 60:.0f} min",
            *(f"{getattr(each, name):.0%}" for name in _SHARES),
            each.binds or "-",
        ]
        for each in walls
    ]
    return SplitTable(("pool", "last", *_SHARES, "binds"), rows, num_left=2)
