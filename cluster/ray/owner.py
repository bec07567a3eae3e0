"""The process that owns a cluster, or sees to it that a Ray cluster has a controller that does.

    python -m cluster.ray.owner --config serving.yaml --run-dir DIR [--attached]

1. Take the run folder's lock, plan, open the launcher; hand the processes to the supervisor.
2. While it serves, hear what people want of it (control socket) and what the planner wants.
3. On SIGTERM or SIGINT, or when told to stop: the supervisor stops everything, then the launcher closes.

Nothing that it started outlives it. It imports neither torch nor transformers, and Ray only where it is used.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.changes.planning import make_planning
from cluster.changes.rollout import Rollouts, Surroundings
from cluster.changes.scaling import Scaler
from cluster.control import serving_control
from cluster.processes import adoption
from cluster.processes.inspection import look_at
from cluster.processes.launcher import StartFailed, log_path
from cluster.processes.plan import PlanError, ProcessSpec
from cluster.processes.resolved_config import make_run_dir, write_config
from cluster.processes.run_lock import RunDirTaken, lock_run_dir
from cluster.processes.starter import Audience, Starter
from cluster.processes.state import StateFile
from cluster.processes.supervisor import Ground, Supervisor
from cluster.ray import settings as ray_settings
from cluster.trust import Trust
from cluster.wiring import NO_RAY, choose_launcher
from common.config import ServingConfig, load_config
from common.log import setup_logging
from common.signals import set_on_signals
from common.trust.doors import scrape_tls

logger = logging.getLogger(__name__)


async def supervise(
    config: ServingConfig, *, config_path: Path, run_dir: Path, audience: Audience, stopping: asyncio.Event
) -> int:
    """Own the cluster of one run folder, whose lock is held, until told to stop. Returns the exit status."""
    state_file = StateFile(run_dir)
    last = state_file.read()
    try:
        trust = _open_trust(config, run_dir)
        plan_for, launcher = choose_launcher(config, trust, config_path=config_path, run_dir=run_dir)
        specs: Sequence[ProcessSpec] = plan_for(config)
        try:
            audience.report(f"opening launcher: {config.launcher}")
            await launcher.open()
            found = launcher.found()
            if found:
                specs = adoption.wanted_processes(config, plan_for, found=found, last=last)
                audience.report(f"{', '.join(sorted(found))} are there already")
            audience.report(f"starting {', '.join(spec.name for spec in specs if spec.name not in found)}")
            supervisor = Supervisor(
                config,
                specs=specs,
                ground=Ground(launcher=launcher, trust=trust, state_file=state_file),
                report=audience.report,
            )
            if adoption.serves_already(found, last):
                supervisor.adopt()
            scaler = Scaler(config, supervisor, plan_for)
            planning = make_planning(scaler, supervisor, scrape_tls=scrape_tls(trust.credentials))
            surroundings = Surroundings(
                keep=partial(write_config, config_path),
                check=planning.guard.check,
                look=partial(look_at, connect=trust.reach.worker),
            )
            rollouts = Rollouts(scaler, supervisor, surroundings)
            serving = serving_control(scaler, rollouts, planning, run_dir, stop=stopping.set)
            async with trust.renewing(), serving, planning.running(stopping):
                await supervisor.run(stopping, on_ready=lambda: audience.ready(supervisor.up))
        finally:
            await launcher.close()
            state_file.remove()
    except (StartFailed, PlanError) as error:
        logger.error("cluster failed to start", extra={"reason": str(error)})
        audience.failed(str(error))
        return 1
    return 0


def _open_trust(config: ServingConfig, run_dir: Path) -> Trust:
    """Return the authority of the run folder's cluster. Raises StartFailed."""
    try:
        return Trust.open(config, run_dir, is_spread=bool(ray_settings.of_joined_cluster(config.launcher)))
    except (OSError, ValueError) as error:
        raise StartFailed(f"cannot make the cluster's certificates in {run_dir}: {error}") from error


async def _own_or_join(config_path: Path, run_dir: Path, starter: Starter) -> int:
    """Run the cluster in this process; in a Ray cluster, see to it that it has a controller, which is what runs it."""
    stopping = asyncio.Event()
    set_on_signals(stopping)
    starter.watch(gone=stopping.set)
    config = load_config(config_path)
    if ray_settings.of_joined_cluster(config.launcher):
        try:
            from cluster.ray.bootstrap import bring_up_controller  # imports Ray
        except ImportError as error:
            starter.failed(f"{NO_RAY} ({error})")
            return 1
        return await bring_up_controller(config, run_dir=run_dir, starter=starter, stopping=stopping)
    with lock_run_dir(run_dir):
        return await supervise(config, config_path=config_path, run_dir=run_dir, audience=starter, stopping=stopping)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the owner; see the module."""
    parser = argparse.ArgumentParser(prog="python -m cluster.ray.owner")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attached", action="store_true", help="stop when stdin closes before the cluster is ready")
    options = parser.parse_args(arguments)
    setup_logging("supervisor")
    make_run_dir(options.run_dir)
    log_path(options.run_dir, "supervisor").parent.mkdir(exist_ok=True)
    starter = Starter.attached() if options.attached else Starter.absent()
    try:
        return asyncio.run(_own_or_join(options.config, options.run_dir, starter))
    except RunDirTaken as error:
        starter.failed(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
