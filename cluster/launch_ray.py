"""Processes as named Ray actors. With RAY_ADDRESS set, in that cluster; else in a private Ray on this machine.

Ray restarts an actor that dies, and the actor starts its service by itself (common.service_actor); this module notices
the death and waits for the successor. The actors are not detached: they end with the driver, which is the supervisor.
A private Ray ends with it too, and only holders of its random token may talk to it.
"""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.launcher import RunningProcess, StartFailed, log_path, log_tail
from cluster.liveness import process_gone, service_gone
from cluster.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig
from common.process import ProcessIdentity, Ready
from common.service_actor import ServiceActor, ServiceParams
from pool_worker.actor import WorkerActor
from router.actor import RouterActor

NAMESPACE = "kvrelay"
_ACTORS: dict[ProcessRole, type[ServiceActor]] = {
    ProcessRole.ROUTER: RouterActor,
    ProcessRole.PREFILL: WorkerActor,
    ProcessRole.DECODE: WorkerActor,
}
_POOL_LABEL = "pool"
_OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB; nothing of ours goes through it
_PRIVATE_CPUS = 1 << 16
"""Of a private Ray, which need not ration them: what a worker may use is its thread count, and pools can grow."""
_RETRY_S = 0.05
_STOP_MARGIN_S = 2.0
_KILL_TIMEOUT_S = 5.0


class RayLauncher:
    """A Launcher of Ray actors. Event loop of the main thread only."""

    def __init__(self, config: ServingConfig, *, run_dir: Path, address: str | None) -> None:
        self._config = config
        self._run_dir = run_dir
        self._address = address
        self._session_dir: Path | None = None
        self._actors: dict[str, Any] = {}

    async def open(self) -> None:
        """Connect to Ray, or start one: blocks for about 3 s. Replaces the SIGTERM handler."""
        try:
            if self._address is not None:
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            else:
                self._session_dir = self._start_private_ray()
        except (RayError, RuntimeError, OSError, ValueError) as error:
            where = f"at RAY_ADDRESS={self._address}" if self._address is not None else "on this machine"
            raise StartFailed(f"Ray {where}: {error}") from error

    def _start_private_ray(self) -> Path:
        context: Any = ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=_PRIVATE_CPUS,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        return Path(context.address_info["session_dir"])

    async def close(self) -> None:
        """Leave Ray; stop it when it is ours, and delete its session folder."""
        self._actors.clear()
        if not ray.is_initialized():
            return
        await asyncio.to_thread(ray.shutdown)
        if self._session_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._session_dir, ignore_errors=True)

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Create the actor, or wait for Ray to have restarted it, until its service serves."""
        path = log_path(self._run_dir, spec.name)
        offset = path.stat().st_size if path.exists() else 0
        actor = self._actors.get(spec.name)
        try:
            if actor is None:
                actor = self._actors[spec.name] = self._create(spec)
                ready: Ready = await actor.ready.remote()
            else:
                ready = await _restarted(actor)
            identity = ProcessIdentity.of(ready.pid) if self._is_on_this_host(spec, ready) else None
        except (RayTaskError, RayActorError) as error:
            # Either the service's own exception, in a process that is now useless, or its process died.
            self._discard(spec.name)
            reason = error.cause if isinstance(error, RayTaskError) else error
            raise StartFailed(f"{spec.name}: {reason}\n{log_tail(path, offset=offset)}".rstrip()) from error
        except asyncio.CancelledError:
            self._discard(spec.name)
            raise
        return _ActorProcess(actor, ready, identity, kill=lambda: self._discard(spec.name))

    def _create(self, spec: ProcessSpec) -> Any:
        config = spec.config or self._config
        if spec.role is ProcessRole.ROUTER:
            config = config.for_router(spec.index)
        params = ServiceParams(
            name=spec.name,
            config=config,
            host=spec.host,
            port=spec.port,
            env=dict(spec.env),
            role=str(spec.role),
            log_path=log_path(self._run_dir, spec.name),
        )
        name = f"{self._config.name}/{spec.name}"
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "max_restarts": -1,
            "max_concurrency": 1000,
            **self._placement(spec),
        }
        try:
            return ray.remote(_ACTORS[spec.role]).options(**options).remote(params)
        except ValueError as error:
            raise StartFailed(f"Ray already has an actor {name}; stop that cluster or choose another name") from error

    def _placement(self, spec: ProcessSpec) -> dict[str, Any]:
        if self._address is None:
            return {}
        if spec.host is not None:  # the first router: clients know it by this host's address
            here = ray.get_runtime_context().get_node_id()
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=False)}
        labels = {node.get("Labels", {}).get(_POOL_LABEL) for node in ray.nodes()}  # type: ignore[no-untyped-call]
        is_labelled = str(spec.role) in labels if spec.role is ProcessRole.ROUTER else bool(labels - {None})
        return {"label_selector": {_POOL_LABEL: str(spec.role)}} if is_labelled else {}

    def _discard(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)

    def _is_on_this_host(self, spec: ProcessSpec, ready: Ready) -> bool:
        """Return whether a pid means something here. What runs anywhere listens on its own host's address."""
        if self._address is None or spec.host is not None:
            return True
        here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return ready.address.rpartition(":")[0] == here


class _ActorProcess:
    """A RunningProcess: one life of an actor."""

    def __init__(self, actor: Any, ready: Ready, identity: ProcessIdentity | None, *, kill: Callable[[], None]) -> None:
        self.ready = ready
        self.identity = identity
        self._actor = actor
        self._kill = kill

    async def exited(self) -> str:
        if self.identity is None:
            return await service_gone(self.ready.address)
        await process_gone(self.identity)
        return f"process {self.ready.pid} died"

    async def stop(self, grace_s: float) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(grace_s + _STOP_MARGIN_S):
                await self._actor.stop.remote(grace_s)
        self._kill()
        if self.identity is not None:
            try:
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await process_gone(self.identity)
            except TimeoutError:
                self.identity.signal(signal.SIGKILL)


async def _restarted(actor: Any) -> Ready:
    """Wait for the successor of a dead actor to serve. Raises RayTaskError, or RayActorError when there is none."""
    while True:
        try:
            ready: Ready = await actor.ready.remote()
        except ActorUnavailableError:
            await asyncio.sleep(_RETRY_S)
        else:
            return ready
