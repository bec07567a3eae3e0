"""`kvrelay up` and `kvrelay down`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.console import Progress, err, out
from kvrelay.cli.options import DEFAULT_CONFIG, ConfigOption, Launcher, LauncherOption
from kvrelay.cli.signals import sigterm_interrupts, uninterrupted
from kvrelay.cli.target import run_dir_of

if TYPE_CHECKING:
    from common.config import ServingConfig


def up(
    config_path: ConfigOption = DEFAULT_CONFIG,
    launcher: LauncherOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay until Ctrl-C or SIGTERM, then stop the cluster.")
    ] = False,
) -> None:
    """Start the cluster and return when every worker is ready.

    \b
    kvrelay up
    kvrelay up --config big.yaml --launcher local
    kvrelay up --foreground        # under systemd, in a container
    """
    from cluster import lifecycle
    from common.config import load_config

    config = load_config(config_path)
    run_dir = lifecycle.default_run_dir(config.name)
    if launcher is not None and launcher.value != config.launcher:
        config = config.model_copy(update={"launcher": launcher.value})
        config_path = write_config(config, run_dir)
    if not foreground:
        with Progress() as report:
            info = lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=report)
        out.print(f"ready at {info.address}", soft_wrap=True)
        err.print('Next: kvrelay generate -p "Why is the sky blue?" · kvrelay status --watch · kvrelay down')
        return
    with sigterm_interrupts():
        try:
            with Progress() as report:
                info = lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=report)
            out.print(f"ready at {info.address}; Ctrl-C stops it", soft_wrap=True)
            _wait_for_exit(info.pid)
            err.print("the supervisor has ended")
        finally:
            _stop(run_dir)


def down(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Stop the cluster: the router drains first, then the workers end. Does nothing when none is running."""
    if not _stop(run_dir_of(config_path)):
        err.print("no cluster is running")


def write_config(config: "ServingConfig", run_dir: Path) -> Path:
    """Write a configuration that differs from the user's file where the cluster's processes can read it."""
    import yaml

    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "serving.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    return path


def _stop(run_dir: Path) -> bool:
    from cluster import lifecycle

    with uninterrupted(), Progress() as report:
        return lifecycle.down(run_dir, report=report)


def _wait_for_exit(pid: int) -> None:
    import psutil

    try:
        psutil.Process(pid).wait()
    except psutil.NoSuchProcess:
        return
