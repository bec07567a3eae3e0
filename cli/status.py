"""`kvrelay status`."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

from cli.console import err, show
from cli.options import IntervalOption, JsonOption, WatchOption, check_form, options_from_dataclasses
from cli.render import AskedRouter, status_view
from cli.target import ConnectionOptions
from kvrelay.client import Client, KvrelayError
from kvrelay.client.failover import RouterList

_TIMEOUT_S = 10.0


@options_from_dataclasses
def status(
    *,
    connection: ConnectionOptions,
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show every router and every worker: load, pages, leases, KV moved.

    \b
    kvrelay status
    kvrelay status --watch --interval 0.5
    kvrelay status --json | jq '.workers[].status.load'
    """  # noqa: D301 - \b marks a preformatted block
    check_form(watch=watch, as_json=as_json)
    with ExitStack() as stack:
        cluster = connection.cluster()
        addresses = RouterList(cluster.address, max_attempts=1).addresses
        options = {"timeout_s": _TIMEOUT_S, **cluster.client_options(connection.api_key)}
        clients = [stack.enter_context(Client(each, **options)) for each in addresses]
        if cluster.trouble:
            err.print(f"the controller does not supervise the processes: {cluster.trouble}", soft_wrap=True)
        show(
            lambda: _ask(clients),
            view=status_view,
            record=_record,
            watch=watch,
            interval_s=interval_s,
            as_json=as_json,
        )


def _ask(clients: Sequence[Client]) -> list[AskedRouter]:
    """Ask every router. Raises KvrelayError when none answers."""
    asked, errors = [], []
    for client in clients:
        try:
            status = client.status()
            waiting = client.diagnose().waiting if status.router.num_queued else ""
            asked.append(AskedRouter(address=client.address, status=status, waiting=waiting))
        except KvrelayError as error:
            asked.append(AskedRouter(address=client.address, status=None, error=error.message))
            errors.append(error)
    if len(errors) == len(clients):
        raise errors[0]
    return asked


def _record(routers: Sequence[AskedRouter]) -> dict[str, object]:
    """Return the status from the first router that answers, and every router by itself."""
    status = next(asked.status for asked in routers if asked.status is not None)
    each = [
        {
            "address": asked.address,
            "status": dataclasses.asdict(asked.status.router) if asked.status is not None else None,
            "waiting": asked.waiting,
            "error": asked.error,
        }
        for asked in routers
    ]
    return {**dataclasses.asdict(status), "routers": each}
