"""The supervisor process: owns a cluster, or makes sure that a Ray cluster has a controller that does.

    python -m cluster.owner --run-dir DIR [--attached]

It imports neither torch nor transformers, and Ray only if that is used.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.processes.run_dir import FILE_NAME, RunDirTaken, lock_run_dir, log_path, make_run_dir
from cluster.processes.starter import Starter, StartFailure
from cluster.ray import outside
from cluster.wiring import NO_RAY, supervise
from common.config import ServingConfig, load_config
from common.log import setup_logging
from common.signals import set_on_signals


async def _own_or_join(config: ServingConfig, run_dir: Path, starter: Starter) -> int:
    """Run the cluster in this process; in a Ray cluster, make sure that there is a controller, which runs it."""
    stopping = asyncio.Event()
    set_on_signals(stopping)
    starter.watch(gone=stopping.set)
    if outside.joined_environment(config.launcher):
        try:
            from cluster.ray.bootstrap import bring_up_controller  # imports Ray
        except ImportError as error:
            starter.notify(StartFailure(reason=f"{NO_RAY} ({error})"))
            return 1
        return await bring_up_controller(config, run_dir=run_dir, starter=starter, stopping=stopping)
    with lock_run_dir(run_dir):
        return await supervise(config, run_dir=run_dir, listener=starter, stopping=stopping)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the owner; see the module."""
    parser = argparse.ArgumentParser(prog="python -m cluster.owner")
    parser.add_argument("--run-dir", type=Path, required=True, help="with the serving.yaml of the cluster")
    parser.add_argument("--attached", action="store_true", help="stop when stdin closes before the cluster is ready")
    options = parser.parse_args(arguments)
    config = load_config(options.run_dir / FILE_NAME)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit statuses of children
    setup_logging("supervisor")
    make_run_dir(options.run_dir)
    log_path(options.run_dir, "supervisor").parent.mkdir(exist_ok=True)
    starter = Starter.attached() if options.attached else Starter.absent()
    try:
        return asyncio.run(_own_or_join(config, options.run_dir, starter))
    except RunDirTaken as error:
        starter.notify(StartFailure(reason=str(error)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
