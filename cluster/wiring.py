"""Chooses the launcher that a configuration asks for, and looks at this machine for the plan."""

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.processes.launch_local import LocalLauncher, service_command
from cluster.processes.launcher import Launcher, StartFailed
from cluster.processes.plan import HostResources, ProcessSpec, make_plan
from cluster.ray import settings as ray_settings
from cluster.trust import Trust
from common.config import ServingConfig
from engine.memory import measure_host

NO_RAY = "launcher: ray needs Ray: pip install 'kvrelay[ray]', or set launcher: local"
PlanFor = Callable[[ServingConfig], tuple[ProcessSpec, ...]]
"""Returns the processes of a configuration, or of the same one with other pool sizes. Raises PlanError."""


def choose_launcher(
    config: ServingConfig, trust: Trust, *, config_path: Path, run_dir: Path
) -> tuple[PlanFor, Launcher]:
    """Return what plans, and what carries plans out. Raises StartFailed when Ray is wanted and not there."""
    if config.launcher == "ray":
        return _ray(config, trust, run_dir)
    pools = config.pools
    gpus = _visible_gpus() if pools.prefill.num_gpus or pools.decode.num_gpus else None
    host = _this_host(gpus)
    command = service_command(config_path)
    return partial(make_plan, host=host), LocalLauncher(command=command, run_dir=run_dir, authority=trust.authority)


def _ray(config: ServingConfig, trust: Trust, run_dir: Path) -> tuple[PlanFor, Launcher]:
    is_joined = bool(ray_settings.of_joined_cluster(config.launcher))
    if not is_joined:
        ray_settings.prepare_to_start()
    try:
        from cluster.ray.joined_ray import JoinedRay
        from cluster.ray.launch_ray import RayHome, RayLauncher
        from cluster.ray.private_ray import PrivateRay
    except ImportError as error:
        raise StartFailed(f"{NO_RAY} ({error})") from error
    # Ray deals out the GPUs itself, and in a Ray cluster of its own it also chooses the hosts.
    host = None if is_joined else _this_host(None)
    home: RayHome = JoinedRay(config.name) if is_joined else PrivateRay()
    launcher = RayLauncher(config, run_dir=run_dir, home=home, authority=trust.authority, credentials=trust.credentials)
    return partial(make_plan, host=host), launcher


def _this_host(gpus: list[str] | None) -> HostResources:
    return HostResources(cores=num_cores(), gpus=gpus, memory_bytes=measure_host().available_bytes)


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES allows, or every GPU of the machine. Asks the driver's tool, not torch."""
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    if configured is not None:
        return [device for device in configured.split(",") if device]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(idx) for idx, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]
