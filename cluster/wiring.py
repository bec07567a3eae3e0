"""Assembles a cluster: planner of processes, launcher, supervisor, control socket; and runs it."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from cluster.changes.change import Changes
from cluster.changes.planning import make_planning
from cluster.changes.rollout import RolloutHooks, Rollouts
from cluster.changes.scaling import PlanFor, Scaler
from cluster.control_service import Controls, serving_control
from cluster.health.health_monitor import HealthMonitor
from cluster.health.trial import try_worker
from cluster.processes.launch_local import LocalLauncher, modules_to_fork, service_command
from cluster.processes.launcher import Launcher, StartFailed
from cluster.processes.plan import HostResources, PlanError, ProcessSpec, largest_crowd, make_plan, threads_of_ranks
from cluster.processes.run_dir import FILE_NAME, write_config
from cluster.processes.starter import StartFailure, StartListener, StartStep
from cluster.processes.state import ClusterPhase, StateFile, has_served, wanted_processes
from cluster.processes.supervisor import Supervisor, SupervisorContext
from cluster.processes.worker_calls import inspect_worker
from cluster.ray import outside
from cluster.takeover import TakeoverFailed
from cluster.trust import Trust
from common.cgroups import usable_cores
from common.clock import SystemClock
from common.config import ConfigError, ServingConfig
from common.otlp import check_installed
from common.process import list_gpus
from common.trust.doors import scrape_tls
from engine.device.memory import measure_host

_NUM_SENT_CHANGES = 8
"""Latest changes of the planner that are sent to routers."""

logger = logging.getLogger(__name__)

NO_RAY = "launcher: ray needs Ray: pip install 'kvrelay[ray]', or set launcher: local"


async def supervise(
    config: ServingConfig,
    *,
    run_dir: Path,
    listener: StartListener,
    stopping: asyncio.Event,
    confirm_end: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Run the cluster of one run folder, whose lock is held, until asked to stop. Returns the exit status.

    No process that it started outlives it, except in a joined Ray cluster when it is killed. `confirm_end` is awaited
    once all of them were stopped; if it raises, state.json stays. Raises TakeoverFailed when the processes of an
    earlier life serve but it cannot begin to supervise them: then it has changed nothing, and can be tried again.
    """

    def report(text: str) -> None:
        listener.notify(StartStep(text=text))

    state_file = StateFile(run_dir)
    last = state_file.read()
    environment = outside.joined_environment(config.launcher)
    is_takeover = bool(environment) and last is not None and last.phase in (ClusterPhase.READY, ClusterPhase.ADOPTING)
    has_begun = False
    try:
        _check_tracing(config)
        trust = _open_trust(config, run_dir)
        plan_for, launcher = _choose_launcher(config, trust, run_dir=run_dir)
        specs: Sequence[ProcessSpec] = plan_for(config)
        if (crowd := largest_crowd(specs)) > 1:
            report(f"warning: {crowd} workers share a GPU and its memory: lower pools.*.count to one for each GPU")
        if not environment and (num_threads := threads_of_ranks(config, specs)) > usable_cores():
            report(
                f"warning: the workers compute with {num_threads} threads on {usable_cores()} cores, and ranks wait for"
                " each other in every layer: lower pools.*.tensor_parallel"
            )
        try:
            report(f"opening launcher: {config.launcher}")
            await launcher.open()
            found = launcher.found()
            if found:
                specs = wanted_processes(config, plan_for, found=found, last=last)
                report(f"{', '.join(sorted(found))} are there already")
            report(f"starting {', '.join(spec.name for spec in specs if spec.name not in found)}")
            context = SupervisorContext(
                launcher=launcher, trust=trust, state_file=state_file, ray_environment=environment
            )
            supervisor = Supervisor(config, specs=specs, context=context, report=report)
            if has_served(found, last):
                is_takeover = True
                supervisor.adopt()
            workforce, changes = supervisor.workforce, Changes()
            scaler = Scaler(config, workforce, plan_for)
            planning = make_planning(scaler, workforce, changes, scrape_tls=scrape_tls(trust.credentials))
            workforce.routers.plan = partial(planning.autopilot.response, num_changes=_NUM_SENT_CHANGES)
            hooks = RolloutHooks(
                keep=partial(write_config, run_dir / FILE_NAME),
                check=planning.guard.check,
                inspect=partial(inspect_worker, connect=trust.reach.worker),
            )
            rollouts = Rollouts(scaler, workforce, hooks)
            monitor = HealthMonitor(
                workforce,
                changes,
                config=lambda: scaler.config,
                try_=partial(try_worker, connect=trust.reach.worker),
                clock=SystemClock(),
            )
            controls = Controls(scaler=scaler, rollouts=rollouts, planning=planning, changes=changes, stop=stopping.set)
            async with (
                trust.renewing(),
                serving_control(controls, run_dir),
                planning.running(stopping),
                monitor.watching(),
            ):
                has_begun = True
                await supervisor.run(
                    stopping, on_ready=lambda: listener.notify(supervisor.up), end_changes=changes.close
                )
        finally:
            await launcher.close()
            if has_begun and confirm_end is not None:
                await confirm_end()
            if has_begun or not is_takeover:
                state_file.remove()
    except Exception as error:
        if is_takeover and not has_begun:
            raise TakeoverFailed(str(error) or repr(error)) from error
        if not isinstance(error, StartFailed | PlanError):
            raise
        logger.error("cluster failed to start", extra={"reason": str(error)})
        listener.notify(StartFailure(reason=str(error), key=error.key if isinstance(error, StartFailed) else ""))
        return 1
    return 0


def _check_tracing(config: ServingConfig) -> None:
    """Raise StartFailed when no process could trace as configured."""
    try:
        check_installed(config.tracing)
    except ConfigError as error:
        raise StartFailed(str(error), key=error.key) from error


def _open_trust(config: ServingConfig, run_dir: Path) -> Trust:
    """Return the authority of the run folder's cluster. Raises StartFailed."""
    try:
        return Trust.open(config, run_dir, is_spread=bool(outside.joined_environment(config.launcher)))
    except (OSError, ValueError) as error:
        raise StartFailed(f"cannot make the cluster's certificates in {run_dir}: {error}") from error


def _choose_launcher(config: ServingConfig, trust: Trust, *, run_dir: Path) -> tuple[PlanFor, Launcher]:
    """Return the plan function and the launcher of a configuration. Raises StartFailed if Ray is missing."""
    if config.launcher == "ray":
        return _ray(config, trust, run_dir)
    host = _this_host(_visible_gpus() if config.deals_gpus or _reserves_gpus(config) else None)
    launcher = LocalLauncher(
        command=service_command(run_dir / FILE_NAME),
        modules=partial(modules_to_fork, config_path=run_dir / FILE_NAME),
        run_dir=run_dir,
        authority=trust.authority,
        credentials=trust.credentials,
    )
    return partial(make_plan, host=host), launcher


def _ray(config: ServingConfig, trust: Trust, run_dir: Path) -> tuple[PlanFor, Launcher]:
    is_joined = bool(outside.joined_environment(config.launcher))
    if not is_joined:
        outside.prepare_to_start()
    try:
        from cluster.ray.joined_ray import JoinedRay
        from cluster.ray.launch_ray import RayLauncher
        from cluster.ray.private_ray import PrivateRay
    except ImportError as error:
        raise StartFailed(f"{NO_RAY} ({error})") from error
    # Ray assigns the GPUs that are reserved; in a joined cluster it also chooses the hosts.
    deals_gpus = config.deals_gpus and not _reserves_gpus(config)
    host = None if is_joined else _this_host(_visible_gpus() if deals_gpus else None)
    home = JoinedRay(config.name) if is_joined else PrivateRay(config.name)
    launcher = RayLauncher(config, run_dir=run_dir, home=home, authority=trust.authority, credentials=trust.credentials)
    return partial(make_plan, host=host), launcher


def _this_host(gpus: list[str] | None) -> HostResources:
    return HostResources(cores=usable_cores(), gpus=gpus, memory_bytes=measure_host().available_bytes)


def _reserves_gpus(config: ServingConfig) -> bool:
    return bool(config.pools.prefill.num_gpus or config.pools.decode.num_gpus)


def _visible_gpus() -> list[str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or else all of this host."""
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    if configured is not None:
        return [device for device in configured.split(",") if device]
    return list_gpus()
