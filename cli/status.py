"""`kvrelay status`."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from time import sleep
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from cli.console import out, print_wide
from cli.options import DEFAULT_CONFIG, AddressOption, ApiKeyOption, CaOption, ConfigOption
from cli.render import AskedRouter, status_view
from cli.target import find_cluster
from kvrelay.client import Client, KvrelayError
from kvrelay.client.failover import RouterList

_TIMEOUT_S = 10.0


def status(
    address: AddressOption = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    config_path: ConfigOption = DEFAULT_CONFIG,
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
        cluster = find_cluster(address, ca, config_path)
        addresses = RouterList(cluster.address, max_attempts=1).addresses
        options = {"timeout_s": _TIMEOUT_S, **cluster.client_options(api_key)}
        clients = [stack.enter_context(Client(each, **options)) for each in addresses]
        if watch:
            _watch(clients, interval_s)
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


def _watch(clients: Sequence[Client], interval_s: float) -> None:
    view: RenderableType = status_view(_ask(clients))
    try:
        with Live(view, console=out, auto_refresh=False) as live:
            while True:
                sleep(interval_s)
                try:
                    view = status_view(_ask(clients))
                except KvrelayError as error:  # a router that restarts comes back into view
                    view = f"{error.message}\nstill trying; Ctrl-C ends"
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        return
