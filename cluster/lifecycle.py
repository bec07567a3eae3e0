"""Starts clusters, for the command line, and runs them for a while. Imports neither torch nor Ray."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cluster.doctor.finding import Health
from cluster.doctor.host import check_doors, check_kernels, find_compiler, this_host
from cluster.processes.run_dir import FILE_NAME, make_run_dir, write_config
from cluster.processes.starter import Report, Up, start_supervisor
from cluster.processes.state import StateFile
from cluster.ray import outside
from cluster.resolving import ClusterError, with_model, with_ports
from cluster.stopping import clean_up, down
from common.config import ServingConfig
from common.model_files import CACHE_ENV, cache_dir, expanded, unusable
from common.signals import uninterrupted

__all__ = [
    "ClusterError",
    "ClusterInfo",
    "default_run_dir",
    "down",
    "read_info",
    "running_cluster",
    "running_names",
    "up",
    "wait_for_end",
]

RUN_DIR_ENV = "KVRELAY_RUN_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo(Up):
    """A running cluster."""

    run_dir: Path
    trouble: str = ""
    """Why its controller does not supervise it yet, though it serves."""

    @property
    def address(self) -> str:
        """The routers' addresses as a client takes them, separated by commas."""
        return ",".join(self.addresses)

    @property
    def http_address(self) -> str:
        """The first router's HTTP door; empty without one."""
        return next(iter(self.http_addresses), "")


def default_run_dir(name: str) -> Path:
    """Return a cluster's run folder: `$KVRELAY_RUN_DIR/<name>`, else `~/.cache/kvrelay/run/<name>`. Raises NoHome."""
    return _run_dirs() / name


def running_names() -> list[str]:
    """Return the names of the clusters of this user that run, start or stop on this host. Raises NoHome."""
    return sorted(state.parent.name for state in _run_dirs().glob("*/state.json") if read_info(state.parent))


def _run_dirs() -> Path:
    configured = os.environ.get(RUN_DIR_ENV)
    return expanded(configured) if configured else cache_dir() / "run"


def read_info(run_dir: Path) -> ClusterInfo | None:
    """Return the cluster that runs, starts or stops in a folder, or None."""
    state = StateFile(run_dir).read()
    if state is None or not state.supervisor.is_alive():
        return None
    return ClusterInfo(
        addresses=state.addresses,
        http_addresses=state.http_addresses,
        pid=state.supervisor.pid,
        run_dir=run_dir,
        tls=state.tls,
        trouble=state.trouble,
    )


def up(config: ServingConfig, *, config_path: Path, run_dir: Path, report: Report) -> ClusterInfo:
    """Start a cluster and return when it serves with every worker. Blocks; `report` is called with each step.

    `config_path` is for messages only, since callers may have overridden values. The cluster outlives this process,
    unless this process dies or is interrupted before the cluster serves. Raises ClusterError.
    """
    run_dir = run_dir.expanduser().resolve()
    running = read_info(run_dir)
    if running is not None:
        raise ClusterError(
            f"a cluster already runs in {run_dir}: it serves on {running.address} (supervisor {running.pid});"
            " stop it with `kvrelay down`"
        )
    left = _left_in_ray(config.name, run_dir, report)
    if left and (run_dir / FILE_NAME).exists():
        report(f"Ray still runs {', '.join(left)}: taking them over as they are; `kvrelay down` would remove them")
        return _start(config_path, run_dir, report)
    clean_up(StateFile(run_dir), report)
    config = with_ports(with_model(config, config_path, report), config_path)
    # The compiler is looked for first: counting GPUs may take seconds.
    if find_compiler() is None and (kernels := check_kernels(config, this_host())).verdict is Health.WARNING:
        report(f"{kernels.detail} on this host; {kernels.advice}")
    if (doors := check_doors(config)).verdict is Health.WARNING:
        report(f"{doors.detail}; {doors.advice}")
    try:
        _prepare(run_dir, config)
    except OSError as error:
        variable = RUN_DIR_ENV if RUN_DIR_ENV in os.environ else CACHE_ENV
        raise ClusterError(unusable(run_dir, error, variable=variable)) from error
    return _start(config_path, run_dir, report)


def _prepare(run_dir: Path, config: ServingConfig) -> None:
    """Make a run folder with nothing but the configuration of a cluster that is to start. Raises OSError."""
    make_run_dir(run_dir)
    for old_log in (run_dir / "logs").glob("*.log*"):
        old_log.unlink()
    for old_config in run_dir.glob("serving-*.yaml"):
        old_config.unlink()
    write_config(run_dir / FILE_NAME, config)


@contextlib.contextmanager
def running_cluster(
    config: ServingConfig, *, config_path: Path, run_dir: Path, report: Report
) -> Iterator[ClusterInfo]:
    """Run a cluster inside the block, and leave no process behind however it ends. Main thread only.

    See `up` for the arguments. State and logs stay in `run_dir`. Raises ClusterError.
    """
    info = up(config, config_path=config_path, run_dir=run_dir, report=report)
    try:
        yield info
    finally:
        with uninterrupted():
            down(run_dir, report=report)


def wait_for_end(info: ClusterInfo) -> None:
    """Return when a cluster has ended. Blocks."""
    state = StateFile(info.run_dir).read()
    if state is not None and state.ray_environment:
        outside.wait_for_end(info.run_dir)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(info.pid).wait()


def _left_in_ray(name: str, run_dir: Path, report: Report) -> list[str]:
    """Return the remaining actors of a cluster without a supervisor. Raises ClusterError if Ray does not answer."""
    state = StateFile(run_dir).read()
    environment = outside.reaches_ray(state) if state is not None else {}
    try:
        return outside.find_actors(name, environment, report=report) if environment else []
    except outside.RayDoesNotAnswer as error:
        raise ClusterError(
            f"{error}; processes of the last `kvrelay up` may still run there. Repeat when it answers, or delete"
            f" {run_dir / 'state.json'} if that Ray is gone for good"
        ) from error


def _start(config_path: Path, run_dir: Path, report: Report) -> ClusterInfo:
    outcome = start_supervisor(run_dir, report)
    if not isinstance(outcome, Up):
        raise ClusterError(f"{config_path}:{outcome.key}: {outcome.reason}" if outcome.key else outcome.reason)
    return ClusterInfo(**asdict(outcome), run_dir=run_dir)
