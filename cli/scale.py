"""`kvrelay scale`, `restart`, `rollout`: other sizes, new workers, another configuration; no request is lost."""

from typing import Annotated

import typer

from cli.changes import show_steps
from cli.console import Progress, out
from cli.errors import CliError
from cli.options import DEFAULT_CONFIG, ConfigOption, LauncherOption
from cli.target import running_cluster

_POOLS = ("prefill", "decode")
GraceOption = Annotated[
    float, typer.Option("--grace", metavar="SECONDS", min=0.1, max=3600, help="Most time for a worker to leave.")
]


def _pools(incomplete: str) -> list[str]:
    """Return the beginnings of sizes, for the shell to complete."""
    return [f"{pool}=" for pool in _POOLS if pool.startswith(incomplete)]


def scale(
    sizes: Annotated[
        list[str], typer.Argument(metavar="POOL=N…", help="prefill=3, decode=2, or both.", autocompletion=_pools)
    ],
    config_path: ConfigOption = DEFAULT_CONFIG,
    grace_s: GraceOption = 30.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Allow pools too small for the present load, or too large for the host."),
    ] = False,
    flip: Annotated[bool, typer.Option("--flip/--no-flip", help="Let workers change their pool.")] = True,
) -> None:
    """Make the running cluster's pools larger or smaller; requests go on.

    \b
    kvrelay scale decode=3
    kvrelay scale prefill=2 decode=1 --grace 60

    New workers start first. The running answers of a worker that leaves move to
    others with their KV, after a pause of one prefill at most. Where one pool
    shrinks and the other grows, workers change over with their model and cache.
    Sizes that the present load or a cluster's only host does not allow need --force.
    serving.yaml is not changed: the next `kvrelay up` starts with its sizes, and a
    rollout keeps these until a pool's count in the file is edited. Ctrl-C ends
    the display alone, `kvrelay cancel` the change.
    """  # noqa: D301 - \b marks a preformatted block
    from cluster.control import scale as ask

    wanted = _parse(sizes)
    info = running_cluster(config_path)
    with Progress() as report:
        show_steps(ask(info.run_dir, wanted, grace_s=grace_s, force=force, no_flip=not flip), report)
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
        show_steps(ask(info.run_dir, grace_s=grace_s), report)
    out.print("every worker is new")


def _parse(sizes: list[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for text in sizes:
        pool, _, count = text.partition("=")
        if pool not in _POOLS or not count.isdecimal():
            raise CliError(f"cannot read {text!r}; give prefill=N or decode=N")
        wanted[pool] = int(count)
    return wanted


def rollout(
    config_path: ConfigOption = DEFAULT_CONFIG,
    launcher: LauncherOption = None,
    canary_s: Annotated[
        float,
        typer.Option(
            "--canary",
            metavar="SECONDS",
            min=0,
            max=86400,
            help="Time for which the first new worker of each pool serves before the others follow; 0: no canary.",
        ),
    ] = 15.0,
    max_slowdown: Annotated[
        float, typer.Option("--max-slowdown", metavar="TIMES", min=1, help="Largest slowdown of a canary.")
    ] = 1.5,
    grace_s: GraceOption = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Allow pools that are smaller than their load needs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the differences and what they need.")] = False,
) -> None:
    """Bring the running cluster to the present configuration file; requests go on.

    \b
    kvrelay rollout --dry-run
    kvrelay rollout --config serving.yaml --canary 60

    A key that cannot change while the cluster runs is refused by name, and then
    nothing changes. One new worker of each pool serves beside the old ones first.
    If it does not start, dies or is slower, it is removed and the old
    configuration stays: exit status 1. Another model, or block size, needs a
    second set of workers and two routers.
    """  # noqa: D301 - \b marks a preformatted block
    from cluster import control
    from cluster.changes.rollout import RolloutTerms
    from cluster.resolving import with_model
    from common.config import load_config

    config = load_config(config_path)
    if launcher is not None:
        config = config.model_copy(update={"launcher": launcher})
    info = running_cluster(config_path)
    with Progress() as report:
        config = with_model(config, config_path, report)
        if dry_run:
            steps = control.preview_rollout(info.run_dir, config)
        else:
            terms = RolloutTerms(canary_s=canary_s, max_slowdown=max_slowdown, grace_s=grace_s, is_forced=force)
            steps = control.rollout(info.run_dir, config, terms)
        show_steps(steps, report)
    if not dry_run:
        out.print(f"the cluster runs {config_path}")
