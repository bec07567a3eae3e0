"""The process that owns a cluster: it starts router and workers, restarts what dies, tells the router, and cleans up.

    python -m cluster.supervisor --config serving.yaml --run-dir DIR [--attached]

1. Take the run folder's lock, plan, open the launcher, start everything.
2. When every process serves and the router uses every worker: phase READY.
3. Until SIGTERM or SIGINT: restart, push the membership, keep state.json true.
4. Stop: the router drains first, since what it drains needs the workers; then the workers; then the launcher.

Nothing it started outlives it. It imports neither torch nor transformers, and Ray only through `cluster.launch_ray`.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.launcher import Launcher, StartFailed, log_path
from cluster.managed_process import ManagedProcess
from cluster.membership import MembershipPusher
from cluster.plan import PlanError, ProcessRole, ProcessSpec
from cluster.ports import dial_address
from cluster.run_lock import RunDirTaken, lock_run_dir
from cluster.starter import Starter
from cluster.state import ClusterPhase, ClusterState, StateFile
from cluster.wiring import choose_launcher
from common.clock import SystemClock
from common.config import ServingConfig, load_config
from common.log import setup_logging
from common.process import ProcessIdentity
from kvrelay.v1 import router_admin_pb2, worker_pb2

logger = logging.getLogger(__name__)

_ACCEPT_TIMEOUT_S = 30.0
_WIRE_ROLES = {
    ProcessRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    ProcessRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGrace:
    """How long processes may take to stop before they are killed."""

    router_s: float = 12.0
    """The router itself cancels what is left after 10 s."""
    worker_s: float = 7.0
    """Workers do so after 5 s."""


class Supervisor:
    """Runs one cluster. Event loop of the main thread only."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        specs: Sequence[ProcessSpec],
        launcher: Launcher,
        state_file: StateFile,
        report: Callable[[str], None],
        grace: StopGrace | None = None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._state_file = state_file
        self._report = report
        self._grace = grace or StopGrace()
        self._phase = ClusterPhase.STARTING
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process is alive"
        self._identity = identity
        self._address = dial_address(config.router.host, config.router.port)
        http_port = config.router.http_port
        self._http_address = "" if http_port is None else dial_address(config.router.host, http_port)
        self._pusher = MembershipPusher(self._address, self._membership)
        clock = SystemClock()
        self._processes = [
            ManagedProcess(spec, launcher=launcher, clock=clock, changed=self._process_changed) for spec in specs
        ]
        self._all_served = asyncio.Event()

    @property
    def address(self) -> str:
        """The router's host:port, as a client dials it."""
        return self._address

    @property
    def http_address(self) -> str:
        """The same of its HTTP door; empty without one."""
        return self._http_address

    async def run(self, stopping: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Serve until `stopping`, then stop everything. Raises StartFailed when the cluster does not come up."""
        self._save()
        serving = asyncio.create_task(self._serve(on_ready))
        stop_wanted = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([serving, stop_wanted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_wanted.cancel()
            serving.cancel()
            await asyncio.wait([serving, stop_wanted])
            failed = not serving.cancelled()
            self._enter(ClusterPhase.FAILED if failed else ClusterPhase.STOPPING)
            await self._stop_all()
        if failed:
            serving.result()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for process in self._processes:
                    tasks.create_task(process.keep_running())
                tasks.create_task(self._pusher.run())
                await self._until_ready()
                self._enter(ClusterPhase.READY)
                on_ready()
        except* StartFailed as failures:
            first = failures.exceptions[0]
            raise StartFailed(str(first)) from None

    async def _until_ready(self) -> None:
        await self._all_served.wait()
        num_workers = len(self._processes) - 1
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                await self._pusher.until_ready(num_workers)
        except TimeoutError:
            used = f"{self._pusher.num_ready} of {num_workers} workers"
            raise StartFailed(f"the router uses only {used} after {_ACCEPT_TIMEOUT_S:g} s; see its log") from None

    def _process_changed(self, process: ManagedProcess) -> None:
        if process.spec.role is ProcessRole.ROUTER:
            self._pusher.router_changed()
        else:
            self._pusher.worker_changed()
        if self._phase is ClusterPhase.STARTING and process.address is not None:
            served = sum(1 for each in self._processes if each.address is not None)
            self._report(f"{process.spec.name} is up ({served} of {len(self._processes)})")
        if all(each.num_lives > 0 for each in self._processes):
            self._all_served.set()
        self._save()

    def _membership(self) -> list[router_admin_pb2.WorkerEndpoint]:
        return [
            router_admin_pb2.WorkerEndpoint(
                worker_id=process.spec.name, role=_WIRE_ROLES[process.spec.role], address=process.address
            )
            for process in self._processes
            if process.spec.role in _WIRE_ROLES and process.address is not None
        ]

    async def _stop_all(self) -> None:
        routers = [each for each in self._processes if each.spec.role is ProcessRole.ROUTER]
        workers = [each for each in self._processes if each.spec.role is not ProcessRole.ROUTER]
        for group, grace_s in ((routers, self._grace.router_s), (workers, self._grace.worker_s)):
            await asyncio.gather(*(each.stop(grace_s) for each in group))

    def _enter(self, phase: ClusterPhase) -> None:
        self._phase = phase
        logger.info("cluster %s", phase)
        self._save()

    def _save(self) -> None:
        processes = tuple(process.state() for process in self._processes)
        known = {state.identity for state in processes}
        below = (ProcessIdentity.of(child.pid) for child in psutil.Process().children(recursive=True))
        self._state_file.write(
            ClusterState(
                name=self._config.name,
                launcher=self._config.launcher,
                phase=self._phase,
                supervisor=self._identity,
                address=self._address,
                http_address=self._http_address,
                processes=processes,
                helpers=tuple(each for each in below if each is not None and each not in known),
            )
        )


async def supervise(config_path: Path, run_dir: Path, starter: Starter) -> int:
    """Own the cluster of one run folder until told to stop. Returns the exit status."""
    stopping = asyncio.Event()
    _stop_on_signals(stopping)
    starter.watch(gone=stopping.set)
    state_file = StateFile(run_dir)
    config = load_config(config_path)
    try:
        specs, launcher = choose_launcher(config, config_path=config_path, run_dir=run_dir)
        try:
            starter.report(f"opening launcher: {config.launcher}")
            await launcher.open()
            starter.report(f"starting {', '.join(spec.name for spec in specs)}")
            _stop_on_signals(stopping)  # again: Ray puts its own handlers in place
            supervisor = Supervisor(
                config, specs=specs, launcher=launcher, state_file=state_file, report=starter.report
            )
            await supervisor.run(
                stopping,
                on_ready=lambda: starter.ready(supervisor.address, http_address=supervisor.http_address),
            )
        finally:
            await launcher.close()
            state_file.remove()
    except (StartFailed, PlanError) as error:
        logger.error("cluster failed to start", extra={"reason": str(error)})
        starter.failed(str(error))
        return 1
    return 0


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        loop.add_signal_handler(number, stopping.set)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the supervisor; see the module."""
    parser = argparse.ArgumentParser(prog="python -m cluster.supervisor")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attached", action="store_true", help="stop when stdin closes before the cluster is ready")
    options = parser.parse_args(arguments)
    setup_logging("supervisor")
    log_path(options.run_dir, "supervisor").parent.mkdir(parents=True, exist_ok=True)
    starter = Starter.attached() if options.attached else Starter.absent()
    try:
        with lock_run_dir(options.run_dir):
            return asyncio.run(supervise(options.config, options.run_dir, starter))
    except RunDirTaken as error:
        starter.failed(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
