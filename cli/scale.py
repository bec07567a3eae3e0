"""`kvrelay scale` and `kvrelay restart`: other pool sizes, or new workers, without a lost request."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import Progress, out
from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption
from cli.target import run_dir_of

if TYPE_CHECKING:
    from cluster.lifecycle import ClusterInfo

_POOLS = ("prefill", "decode")
GraceOption = Annotated[
    float, typer.Option("--grace", metavar="SECONDS", min=0.1, max=3600, help="Most time for a worker to leave.")
]


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=N…", help="prefill=3, decode=2, or both.")],
    config_path: ConfigOption = DEFAULT_CONFIG,
    grace_s: GraceOption = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="Allow pools that are too small for the present load.")
    ] = False,
    flip: Annotated[bool, typer.Option("--flip/--no-flip", help="Let workers change their pool.")] = True,
) -> None:
    """Make the running cluster's pools larger or smaller; requests go on.

    \b
    kvrelay scale decode=3
    kvrelay scale prefill=2 decode=1 --grace 60

    New workers come first. A worker that leaves gets no new requests and gives
    its running answers to others, which pull the KV from it: the text is the
    same, after a pause of one prefill at most. Where one pool shrinks and the
    other grows, workers change over with their model and cache. A pool that would
    not carry the present load within the objectives shrinks only with --force.
    serving.yaml is not changed: the next `kvrelay up` starts with its sizes.
    """  # noqa: D301 - \b marks a preformatted block
    from cluster.changes.flipping import Flips
    from cluster.control import scale as ask

    wanted = _parse(sizes)
    info = running_cluster(config_path)
    with Progress() as report:
        flips = Flips.FIRST if flip else Flips.NEVER
        for step in ask(info.run_dir, wanted, grace_s=grace_s, force=force, flips=flips):
            report(step)
    out.print(", ".join(f"{pool}: {count}" for pool, count in wanted.items()))


def restart(config_path: ConfigOption = DEFAULT_CONFIG, grace_s: GraceOption = 30.0) -> None:
    """Replace every worker of the running cluster by a new process, one after the other; requests go on.

    Use it for a new version of kvrelay, or new model files under the same name.
    One additional worker runs meanwhile, so capacity never falls; workers leave
    as with `kvrelay scale`. The router stays.
    """
    from cluster.control import restart as ask

    info = running_cluster(config_path)
    with Progress() as report:
        for step in ask(info.run_dir, grace_s=grace_s):
            report(step)
    out.print("every worker is new")


def _parse(sizes: list[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for text in sizes:
        pool, _, count = text.partition("=")
        if pool not in _POOLS or not count.isdecimal():
            raise CliError(f"{text!r}: say prefill=N or decode=N")
        wanted[pool] = int(count)
    return wanted


def running_cluster(config_path: Path) -> "ClusterInfo":
    """Return the cluster that a configuration file names. Raises CliError when it does not run."""
    from cluster.lifecycle import read_info

    info = read_info(run_dir_of(config_path))
    if info is None:
        raise CliError("no cluster is running; start one with `kvrelay up`")
    return info
