"""`kvrelay rollout`: the running cluster goes over to another configuration, without a lost request."""

from typing import Annotated

import typer

from cli.console import Progress, out
from cli.options import DEFAULT_CONFIG, ConfigOption, LauncherOption
from cli.scale import GraceOption, running_cluster


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
    from cluster.lifecycle import with_model
    from common.config import load_config

    config = load_config(config_path)
    if launcher is not None:
        config = config.model_copy(update={"launcher": launcher.value})
    info = running_cluster(config_path)
    with Progress() as report:
        config = with_model(config, report)
        if dry_run:
            steps = control.preview_rollout(info.run_dir, config)
        else:
            terms = RolloutTerms(canary_s=canary_s, max_slowdown=max_slowdown, grace_s=grace_s, is_forced=force)
            steps = control.rollout(info.run_dir, config, terms)
        for step in steps:
            report(step)
    if not dry_run:
        out.print(f"the cluster runs {config_path}")
