"""`kvrelay doctor`: is this host fit, does the cluster hold together, and what to do if not."""

import asyncio
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cli.console import err, print_wide
from cli.errors import EXIT_FAILURE
from cli.options import DEFAULT_CONFIG, JsonOption, options_from_dataclasses
from cli.target import ConnectionOptions, run_dir_of

if TYPE_CHECKING:
    from cluster.doctor.finding import DoctorFinding

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failure": ("FAILURE", "bold red")}


@options_from_dataclasses
def doctor(
    *,
    connection: ConnectionOptions,
    host_only: Annotated[bool, typer.Option("--host-only", help="Check only this host, not the cluster.")] = False,
    hosts: Annotated[
        Path | None,
        typer.Option(
            "--hosts", metavar="CLUSTER.yaml", help="Check the hosts of this file by ssh.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this host, and the cluster as seen from it. The exit status is 1 when something will not work.

    \b
    kvrelay doctor --host-only            # before `kvrelay up`: packages, model, memory, disk, limits
    kvrelay doctor                        # also the running cluster: every worker, from here
    kvrelay doctor -a HEAD:50051          # on another host: whether it reaches every worker
    kvrelay doctor --hosts cluster.yaml   # the hosts that `ray up` uses, by ssh: missing parts, differences

    It changes nothing.
    """  # noqa: D301 - \b marks a preformatted block
    findings = _ask_hosts(hosts) if hosts else _collect(connection, host_only=host_only)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print_wide(_table(findings))
    num_failures = sum(finding.verdict == "failure" for finding in findings)
    if num_failures:
        err.print(f"kvrelay: {num_failures} of {len(findings)} checks failed")
        raise typer.Exit(EXIT_FAILURE)


def _ask_hosts(path: Path) -> "list[DoctorFinding]":
    from cluster.doctor.hosts import check_hosts, read_hosts, run_command

    return asyncio.run(check_hosts(read_hosts(path), run_command))


def _collect(connection: ConnectionOptions, *, host_only: bool) -> "list[DoctorFinding]":
    from cluster.doctor.host import check_host, this_host
    from cluster.doctor.service import check_service
    from cluster.lifecycle import read_info
    from cluster.trust import operator_credentials
    from common.config import ServingConfig, load_config
    from kvrelay.client import AsyncClient

    config_path, address = connection.config_path, connection.address
    has_file = config_path.exists() or config_path != DEFAULT_CONFIG
    config = load_config(config_path) if has_file else ServingConfig()
    is_up = read_info(run_dir_of(config_path)) is not None
    findings = list(check_host(config, this_host(), is_up=is_up))
    if host_only:
        return findings
    if not is_up and address is None:
        err.print("no cluster runs here: only this host was checked (name a cluster with --address)")
        return findings
    compared = config if has_file and address is None else None
    cluster = connection.cluster()
    # A cluster that was named by its address may have been started elsewhere; its workers answer operators only.
    operator = operator_credentials(run_dir_of(config_path))
    client = partial(AsyncClient, cluster.address, **cluster.client_options(connection.api_key))
    return findings + asyncio.run(check_service(client, compared, operator=operator))


def _table(findings: "list[DoctorFinding]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(Text(*_MARKS[finding.verdict.value]), finding.subject, finding.detail, finding.advice)
    return table
