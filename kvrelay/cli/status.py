"""`kvrelay status`."""

import dataclasses
import json
from time import sleep
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from kvrelay.cli.console import out, print_wide
from kvrelay.cli.options import DEFAULT_CONFIG, AddressOption, ConfigOption
from kvrelay.cli.render import status_view
from kvrelay.cli.target import find_address
from kvrelay.client import Client, KvrelayError

_TIMEOUT_S = 10.0


def status(
    address: AddressOption = None,
    config_path: ConfigOption = DEFAULT_CONFIG,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="With --watch.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: every field, as JSON.")] = False,
) -> None:
    """Show the router and every worker: load, pages, leases, KV moved.

    \b
    kvrelay status
    kvrelay status --watch --interval 0.5
    kvrelay status --json | jq '.workers[].status.load'
    """  # noqa: D301 - \b marks a preformatted block
    if watch and as_json:
        raise typer.BadParameter("--watch and --json exclude each other")
    with Client(find_address(address, config_path), timeout_s=_TIMEOUT_S) as client:
        if watch:
            _watch(client, interval_s)
        elif as_json:
            typer.echo(json.dumps(dataclasses.asdict(client.status()), indent=2))
        else:
            print_wide(status_view(client.status(), address=client.address))


def _watch(client: Client, interval_s: float) -> None:
    view: RenderableType = status_view(client.status(), address=client.address)
    try:
        with Live(view, console=out, auto_refresh=False) as live:
            while True:
                sleep(interval_s)
                try:
                    view = status_view(client.status(), address=client.address)
                except KvrelayError as error:  # a router that restarts comes back into view
                    view = f"{error.message}\nstill trying; Ctrl-C ends"
                live.update(view, refresh=True)
    except KeyboardInterrupt:
        return
