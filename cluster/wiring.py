"""Chooses the launcher that a configuration asks for, and looks at this machine for the plan."""

import os
import socket
from pathlib import Path

from cluster.launch_local import LocalLauncher, service_command
from cluster.launcher import Launcher, StartFailed
from cluster.plan import HostResources, ProcessSpec, make_plan
from common.config import ServingConfig

_WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


def choose_launcher(
    config: ServingConfig, *, config_path: Path, run_dir: Path
) -> tuple[tuple[ProcessSpec, ...], Launcher]:
    """Return the plan and what carries it out. Raises PlanError, or StartFailed when Ray is wanted and not there."""
    if config.launcher == "local":
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        host = HostResources(cores=num_cores(), gpus=gpus.split(",") if gpus else _count_gpus())
        specs = make_plan(config, host)
        return specs, LocalLauncher(command=service_command(config_path), run_dir=run_dir)
    try:
        from cluster.launch_ray import RayLauncher
    except ImportError as error:
        raise StartFailed(
            f"launcher: ray needs Ray ({error}): pip install 'kvrelay[ray]', or set launcher: local"
        ) from error
    launcher = RayLauncher(config, run_dir=run_dir, address=os.environ.get("RAY_ADDRESS"))
    # Ray deals out the GPUs itself. In a Ray cluster of others, it also chooses the hosts.
    ours = HostResources(cores=num_cores(), gpus=None)
    specs = make_plan(config, ours if launcher.is_private else None)
    launcher.reserve(specs)
    return specs, launcher


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dial_address(host: str, port: int) -> str:
    """Return the host:port by which this machine reaches a server that listens on `host`."""
    host = _WILDCARDS.get(host, host).strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str) -> int:
    """Return a port that is free on `host` now. Raises OSError for an address that is not this machine's."""
    with _bound(host, 0) as listener:
        return int(listener.getsockname()[1])


def is_port_free(host: str, port: int) -> bool:
    """Whether `port` can be listened on. Raises OSError for an address that is not this machine's."""
    try:
        _bound(host, port).close()
    except OSError as error:
        if error.errno == 98:
            return False
        raise
    return True
