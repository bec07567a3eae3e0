"""`kvrelay forget`."""

import dataclasses
import json
from typing import Annotated

import typer

from cli.console import err, out
from cli.errors import EXIT_FAILURE
from cli.options import JsonOption, options_from_dataclasses
from cli.target import ConnectionOptions
from kvrelay.client import Forgotten

_TIMEOUT_S = 600.0


@options_from_dataclasses
def forget(
    *,
    tenant: Annotated[str, typer.Argument(help="Name of the tenant; `default` where the cluster has none.")],
    connection: ConnectionOptions,
    cache_salt: Annotated[
        str,
        typer.Option(
            "--cache-salt",
            metavar="SALT",
            help="Of requests that gave this salt; default: of those without one.",
            show_default=False,
        ),
    ] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Deadline of the call.")
    ] = _TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Drop a tenant's cached KV from every worker, and overwrite it on disk.

    \b
    kvrelay forget acme
    kvrelay forget acme --cache-salt project-7

    Let the tenant ask nothing meanwhile: what its requests use stays. New blocks
    are kept as before. The exit status is 1 when blocks may still be somewhere.
    """  # noqa: D301 - \b marks a preformatted block
    with connection.client(timeout_s=timeout_s) as client:
        forgotten = client.forget(tenant, cache_salt=cache_salt)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(forgotten), indent=2))
    else:
        _print(forgotten)
    num_left = sum(bool(each.trouble) for each in forgotten.workers)
    if num_left:
        err.print(f"kvrelay: {num_left} of {len(forgotten.workers)} workers may still have blocks of {tenant}")
        raise typer.Exit(EXIT_FAILURE)


def _print(forgotten: Forgotten) -> None:
    for each in forgotten.workers:
        trouble = f"; NOT ALL: {each.trouble}" if each.trouble else ""
        blocks = f"{each.num_tier_blocks} blocks in tiers, {each.num_page_blocks} in pages"
        out.print(f"{each.worker_id}: forgot {blocks}{trouble}", soft_wrap=True)
    if forgotten.sharing_tenants:
        out.print(f"these blocks were also those of {', '.join(forgotten.sharing_tenants)}", soft_wrap=True)
