"""Starts and stops clusters, for the command line. Imports neither torch nor Ray."""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cluster.processes.run_dir import FILE_NAME, make_run_dir, write_config
from cluster.processes.starter import Report, Up, start_supervisor
from cluster.processes.state import ClusterState, StateFile
from cluster.ray import outside
from common.config import RouterConfig, ServingConfig
from common.errors import KvrelayError
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, cache_dir, resolve_model
from common.ports import dial_address, free_ports, is_port_free
from common.process import ProcessIdentity
from common.signals import uninterrupted

RUN_DIR_ENV = "KVRELAY_RUN_DIR"

_STOP_TIMEOUT_S = 60.0
_DEATH_TIMEOUT_S = 5.0
_POLL_S = 0.02


class ClusterError(Exception):
    """A cluster cannot be started or stopped; the message gives the reason and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo(Up):
    """A running cluster."""

    run_dir: Path

    @property
    def address(self) -> str:
        """The routers' addresses as a client takes them, separated by commas."""
        return ",".join(self.addresses)

    @property
    def http_address(self) -> str:
        """The first router's HTTP door; empty without one."""
        return next(iter(self.http_addresses), "")


def default_run_dir(name: str) -> Path:
    """Return a cluster's run folder: `$KVRELAY_RUN_DIR/<name>`, else `~/.cache/kvrelay/run/<name>`."""
    configured = os.environ.get(RUN_DIR_ENV)
    base = Path(configured).expanduser() if configured else cache_dir() / "run"
    return base / name


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
    left = _left_in_ray(config.name, run_dir)
    resolved_path = run_dir / FILE_NAME
    if left and resolved_path.exists():
        report(f"Ray still runs {', '.join(left)}: taking them over as they are; `kvrelay down` would remove them")
        return _start(resolved_path, run_dir, report)
    _clean_up(StateFile(run_dir), report)
    config = _with_ports(with_model(config, report), config_path)
    make_run_dir(run_dir)
    for old_log in (run_dir / "logs").glob("*.log*"):
        old_log.unlink()
    for old_config in run_dir.glob("serving-*.yaml"):
        old_config.unlink()
    write_config(resolved_path, config)
    return _start(resolved_path, run_dir, report)


def down(run_dir: Path, *, report: Report) -> bool:
    """Stop the cluster of a folder and return whether there was one. Blocks until all its processes are gone.

    Also removes the processes that a killed supervisor left, and, without a state but with RAY_ADDRESS, the Ray actors
    of a cluster named like the folder. Raises ClusterError if a process does not die.
    """
    run_dir = run_dir.expanduser().resolve()
    state_file = StateFile(run_dir)
    state = state_file.read()
    name = state.name if state is not None else run_dir.name
    if state is None or not state.supervisor.is_alive():
        removed = _remove_from_ray(name, state, report)
        return _clean_up(state_file, report) or removed
    drains = "the router drains" if len(state.addresses) == 1 else "the routers drain"
    report(f"stopping the cluster on {', '.join(state.addresses)}: {drains} first")
    _ask_to_stop(state, run_dir)
    if _alive_after([state.supervisor], _STOP_TIMEOUT_S):
        report(f"the supervisor does not stop after {_STOP_TIMEOUT_S:g} s: killing it")
        state = state_file.read() or state
        if not _remove_from_ray(name, state, report):
            state.supervisor.signal(signal.SIGKILL)
        _alive_after([state.supervisor], _DEATH_TIMEOUT_S)
    _clean_up(state_file, report)
    report("stopped")
    return True


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


def _ask_to_stop(state: ClusterState, run_dir: Path) -> None:
    """Tell the supervisor to stop the cluster. Ray would restart an actor that is ended by a signal."""
    if not state.ray_environment:
        state.supervisor.signal(signal.SIGTERM)
        return
    from cluster.control import stop  # gRPC

    with contextlib.suppress(KvrelayError):  # the caller ends it through Ray then
        stop(run_dir)


def _left_in_ray(name: str, run_dir: Path) -> list[str]:
    """Return the remaining actors of a cluster without a supervisor."""
    state = StateFile(run_dir).read()
    environment = outside.reaches_ray(state) if state is not None else {}
    return outside.find_actors(name, environment) if environment else []


def _remove_from_ray(name: str, state: ClusterState | None, report: Report) -> bool:
    """End the actors of a cluster whose supervisor is gone or does not answer; returns whether there were any."""
    environment = outside.reaches_ray(state)
    removed = outside.remove_actors(name, environment) if environment else []
    if removed:
        report(f"removed {', '.join(removed)} from Ray")
    return bool(removed)


def with_model(config: ServingConfig, report: Report) -> ServingConfig:
    """Return the configuration with a model that is on this host, without a relative path. Raises ClusterError."""
    model = config.model
    if model.engine == "fake":
        return config
    try:
        folder = resolve_model(model.id, local_files_only=model.local_files_only)
    except ModelNotFound as error:
        if model.id != DEFAULT_MODEL_ID:
            raise ClusterError(str(error)) from error
        _fetch_default_model(report)
        return config
    is_local_folder = model.id != DEFAULT_MODEL_ID and Path(model.id).expanduser().is_dir()
    if not is_local_folder:
        return config
    return config.model_copy(update={"model": model.model_copy(update={"id": str(folder)})})


def _fetch_default_model(report: Report) -> None:
    from engine.default_model import FetchFailed, fetch_default_model  # imports torch

    try:
        fetch_default_model(report)
    except FetchFailed as error:
        raise ClusterError(str(error)) from error


def _with_ports(config: ServingConfig, config_path: Path) -> ServingConfig:
    """Return the configuration with definite ports of the routers, which restarted routers keep.

    Raises ClusterError for a port that is taken.
    """
    router = config.router
    wanted = {"port": router.port}
    if router.http_port is not None:
        wanted["http_port"] = router.http_port
    definite: dict[str, int] = {}
    # Configured ports first: a free port must differ from them.
    for key in sorted(wanted, key=lambda name: wanted[name] == 0):
        taken = {port + idx for port in definite.values() for idx in range(router.count)}
        definite[key] = _definite_port(router, key, taken=taken, config_path=config_path)
    return config.model_copy(update={"router": router.model_copy(update=definite)})


def _definite_port(router: RouterConfig, key: str, *, taken: Collection[int], config_path: Path) -> int:
    """Return the first of `router.count` consecutive free ports: the configured ones, or any for 0.

    Raises ClusterError.
    """
    host, port = router.host, getattr(router, key)
    try:
        if port == 0:
            return free_ports(host, router.count, taken=taken)
        busy = next((each for each in range(port, port + router.count) if not is_port_free(host, each)), None)
    except OSError as error:
        raise ClusterError(f"{config_path}:router.host: cannot listen on {host}: {error.strerror}") from error
    if busy is None:
        return int(port)
    off = ", or null for no HTTP" if key == "http_port" else ""
    raise ClusterError(
        f"{config_path}:router.{key}: {dial_address(host, busy)} is taken by another program;"
        f" choose another port, or 0 for a free one{off}"
    )


def _start(config_path: Path, run_dir: Path, report: Report) -> ClusterInfo:
    outcome = start_supervisor(config_path, run_dir, report)
    if not isinstance(outcome, Up):
        raise ClusterError(outcome.reason)
    return ClusterInfo(**asdict(outcome), run_dir=run_dir)


def _clean_up(state_file: StateFile, report: Report) -> bool:
    """Kill the processes that a dead supervisor left. Returns whether there were any. Raises ClusterError."""
    state = state_file.read()
    if state is None:
        return False
    if state.supervisor.is_alive():  # it has just started, or outlived SIGKILL
        raise ClusterError(
            f"cannot clean up: a supervisor ({state.supervisor.pid}) is alive; stop its cluster with `kvrelay down`"
        )
    # The kernel ends its children on Linux; this is for others.
    left = [each for each in _members(state) if each.is_alive()]
    for each in left:
        each.signal(signal.SIGKILL)
    stubborn = _alive_after(left, _DEATH_TIMEOUT_S)
    if stubborn:
        raise ClusterError(f"cannot clean up: processes {', '.join(str(each.pid) for each in stubborn)} do not die")
    if left:
        report(f"killed {len(left)} processes that a dead supervisor had left behind")
    state_file.remove()
    return bool(left)


def _members(state: ClusterState) -> list[ProcessIdentity]:
    own = [process.identity for process in state.processes if process.identity is not None]
    return [*own, *state.helpers]


def _alive_after(identities: Iterable[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait for processes to die; return those that are alive after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    left = [each for each in identities if each.is_alive()]
    # Polled: they are not our children, and a dead process keeps its pid until its parent reaps it.
    while left and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        left = [each for each in left if each.is_alive()]
    return left
