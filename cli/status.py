"""`kvrelay status`."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

import typer

from cli.console import print_wide, watch_view
from cli.options import options_from_dataclasses
from cli.render import AskedRouter, status_view
from cli.target import Connection
from kvrelay.client import Client, KvrelayError
from kvrelay.client.failover import RouterList

_TIMEOUT_S = 10.0


@options_from_dataclasses
def status(
    *,
    connection: Connection,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Refresh interval of --watch.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every field, as JSON.")] = False,
) -> None:
    """Show every router and every worker: load, pages, leases, KV moved.

    \b
    kvrelay status
    kvrelay status --watch --interval 0.5
    kvrelay status --json | jq '.workers[].status.load'
    """  # noqa: D301 - \b marks a preformatted block
    if watch and as_json:
        raise typer.BadParameter("--watch and --json exclude each other")
    with ExitStack() as stack:
        cluster = connection.cluster()
        addresses = RouterList(cluster.address, max_attempts=1).addresses
        options = {"timeout_s": _TIMEOUT_S, **cluster.client_options(connection.api_key)}
        clients = [stack.enter_context(Client(each, **options)) for each in addresses]
        if watch:
            watch_view(lambda: status_view(_ask(clients)), interval_s)
        elif as_json:
            typer.echo(json.dumps(_record(_ask(clients)), indent=2))
        else:
            print_wide(status_view(_ask(clients)))


def _ask(clients: Sequence[Client]) -> list[AskedRouter]:
    """Ask every router. Raises KvrelayError when none answers."""
    asked, errors = [], []
    for client in clients:
        try:
            asked.append(AskedRouter(address=client.address, status=client.status()))
        except KvrelayError as error:
            asked.append(AskedRouter(address=client.address, status=None, error=error.message))
            errors.append(error)
    if len(errors) == len(clients):
        raise errors[0]
    return asked


def _record(routers: Sequence[AskedRouter]) -> dict[str, object]:
    """Return what the first router that answers tells, and every router by itself."""
    told = next(asked.status for asked in routers if asked.status is not None)
    each = [
        {
            "address": asked.address,
            "status": dataclasses.asdict(asked.status.router) if asked.status is not None else None,
            "error": asked.error,
        }
        for asked in routers
    ]
    return {**dataclasses.asdict(told), "routers": each}
