"""The control socket of a running supervisor: gRPC on a Unix socket in the run folder, which only its owner can use."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import yaml

from cluster.changes.flipping import Flips
from cluster.changes.planning import Planning
from cluster.changes.rollout import Rollouts, RolloutTerms
from cluster.changes.scaling import Scaler
from cluster.processes.plan import POOLS
from cluster.processes.run_dir import FILE_NAME, config_text
from common.config import ConfigError, ServingConfig, parse_config
from common.errors import InvalidRequest, from_rpc_error
from common.rpc import error_boundary
from kvrelay.v1 import controller_pb2, controller_pb2_grpc

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 30.0
MAX_GRACE_S = 3600.0
_READ_TIMEOUT_S = 10.0
MAX_CANARY_S = 24 * 3600.0
_STOP_TIMEOUT_S = 5.0
_MAX_PATH_BYTES = 100
"""Longest path of the socket; the kernel's limit is 108."""

Context = grpc.aio.ServicerContext[Any, Any]


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """Serves `kvrelay scale`, `kvrelay restart`, `kvrelay rollout`, `kvrelay plan` and `kvrelay down`."""

    def __init__(self, scaler: Scaler, rollouts: Rollouts, planning: Planning, *, stop: Callable[[], None]) -> None:
        self._scaler = scaler
        self._rollouts = rollouts
        self._planning = planning
        self._stop = stop
        self._changes: set[asyncio.Future[Exception | None]] = set()
        """Changes under way, which outlive their callers."""

    async def Scale(self, request: controller_pb2.ScaleRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        wanted = {
            role: getattr(request, role)
            for role in POOLS
            if request.HasField(role.value)  # type: ignore[arg-type]  # the pools' names are the fields'
        }
        async with error_boundary(context, "Scale"):
            grace_s = _grace_s(request.grace_s)
            if not request.force:
                await self._planning.guard.check(wanted)
            flips = Flips.NEVER if request.no_flip else Flips.FIRST
            change = partial(self._scaler.scale, wanted, grace_s=grace_s, flips=flips)
            await self._run(change, lambda text: context.write(controller_pb2.ScaleResponse(text=text)))

    async def RestartWorkers(  # type: ignore[override]  # noqa: D102
        self, request: controller_pb2.RestartWorkersRequest, context: Context
    ) -> None:
        async with error_boundary(context, "RestartWorkers"):
            change = partial(self._rollouts.restart, grace_s=_grace_s(request.grace_s))
            await self._run(change, lambda text: context.write(controller_pb2.RestartWorkersResponse(text=text)))

    async def GetPlan(  # noqa: D102
        self, request: controller_pb2.GetPlanRequest, context: Context
    ) -> controller_pb2.GetPlanResponse:
        async with error_boundary(context, "GetPlan"):
            return self._planning.autopilot.response()

    async def Rollout(self, request: controller_pb2.RolloutRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        async with error_boundary(context, "Rollout"):
            wanted, terms = _wanted(request), _terms(request)
            if request.dry_run:
                change = partial(self._rollouts.preview, wanted)
            else:
                change = partial(self._rollouts.run, wanted, terms)
            await self._run(change, lambda text: context.write(controller_pb2.RolloutResponse(text=text)))

    async def Stop(  # noqa: D102
        self, request: controller_pb2.StopRequest, context: Context
    ) -> controller_pb2.StopResponse:
        self._stop()
        return controller_pb2.StopResponse()

    async def _run(self, change: Callable[..., Awaitable[None]], write: Callable[[str], Awaitable[None]]) -> None:
        """Run a change, which completes even if the caller disconnects; write its steps to the caller and the log."""
        steps: asyncio.Queue[str | None] = asyncio.Queue()

        def report(text: str) -> None:
            logger.info("change: %s", text)
            steps.put_nowait(text)

        async def run() -> Exception | None:
            try:
                await change(report=report)
            except Exception as error:  # noqa: BLE001 - raised below, if the caller is still there
                logger.warning("change failed: %s", error)
                return error
            finally:
                steps.put_nowait(None)
            return None

        running = asyncio.ensure_future(run())
        self._changes.add(running)
        running.add_done_callback(self._changes.discard)
        while (text := await steps.get()) is not None:
            await write(text)
        if (failure := await asyncio.shield(running)) is not None:
            raise failure


def _wanted(request: controller_pb2.RolloutRequest) -> ServingConfig:
    """Return the requested configuration. Raises InvalidRequest."""
    try:
        return parse_config(yaml.safe_load(request.config), source=FILE_NAME)
    except (ConfigError, yaml.YAMLError) as error:
        raise InvalidRequest(str(error), field="config") from error


def _terms(request: controller_pb2.RolloutRequest) -> RolloutTerms:
    if not 0 <= request.canary_s <= MAX_CANARY_S:
        raise InvalidRequest(f"{request.canary_s:g}; between 0 and {MAX_CANARY_S:g} seconds", field="canary_s")
    if not 1 <= request.max_slowdown < math.inf:
        raise InvalidRequest(f"{request.max_slowdown:g}; at least 1", field="max_slowdown")
    return RolloutTerms(
        canary_s=request.canary_s,
        max_slowdown=request.max_slowdown,
        grace_s=_grace_s(request.grace_s),
        is_forced=request.force,
    )


def _grace_s(asked_s: float) -> float:
    if not 0 <= asked_s <= MAX_GRACE_S:
        raise InvalidRequest(f"{asked_s:g}; between 0 and {MAX_GRACE_S:g} seconds", field="grace_s")
    return asked_s or DEFAULT_GRACE_S


def socket_path(run_dir: Path) -> Path:
    """Return the control socket of a cluster."""
    return run_dir / "control.sock"


@asynccontextmanager
async def serving_control(
    scaler: Scaler, rollouts: Rollouts, planning: Planning, run_dir: Path, *, stop: Callable[[], None]
) -> AsyncIterator[None]:
    """Serve while the block runs; `stop` is called to end the cluster.

    If the path is too long for a socket, only a warning is logged.
    """
    path = socket_path(run_dir)
    if len(str(path).encode()) > _MAX_PATH_BYTES:
        logger.warning("the run folder's path is too long for a socket: this cluster cannot be scaled")
        yield
        return
    path.unlink(missing_ok=True)  # left by a killed supervisor: we hold the run folder's lock
    server = grpc.aio.server()
    service = ControllerService(scaler, rollouts, planning, stop=stop)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    path.chmod(0o600)
    try:
        yield
    finally:
        await server.stop(0)
        path.unlink(missing_ok=True)


def scale(
    run_dir: Path, wanted: Mapping[str, int], *, grace_s: float, force: bool = False, flips: Flips = Flips.FIRST
) -> Iterator[str]:
    """Ask the supervisor of a run folder for other pool sizes; yields its steps. Raises KvrelayError.

    Without `force` it refuses sizes that would not carry the present load.
    """
    no_flip = flips is Flips.NEVER
    request = controller_pb2.ScaleRequest(**wanted, grace_s=grace_s, force=force, no_flip=no_flip)
    return _steps(run_dir, lambda stub: stub.Scale(request))


def restart(run_dir: Path, *, grace_s: float) -> Iterator[str]:
    """Ask the supervisor of a run folder to replace its workers one by one; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RestartWorkersRequest(grace_s=grace_s)
    return _steps(run_dir, lambda stub: stub.RestartWorkers(request))


def rollout(run_dir: Path, config: ServingConfig, terms: RolloutTerms) -> Iterator[str]:
    """Ask the supervisor of a run folder for another configuration; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RolloutRequest(
        config=config_text(config),
        canary_s=terms.canary_s,
        max_slowdown=terms.max_slowdown,
        grace_s=terms.grace_s,
        force=terms.is_forced,
    )
    return _steps(run_dir, lambda stub: stub.Rollout(request))


def preview_rollout(run_dir: Path, config: ServingConfig) -> Iterator[str]:
    """Ask what `rollout` would change and what that needs; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RolloutRequest(config=config_text(config), max_slowdown=1.0, dry_run=True)
    return _steps(run_dir, lambda stub: stub.Rollout(request))


def stop(run_dir: Path) -> None:
    """Ask the supervisor of a run folder to stop the cluster; returns at once. Raises KvrelayError."""
    with _stub(run_dir) as stub:
        stub.Stop(controller_pb2.StopRequest(), timeout=_STOP_TIMEOUT_S)


def read_plan(run_dir: Path) -> controller_pb2.GetPlanResponse:
    """Return the planner's latest plans in the cluster of a run folder. Raises KvrelayError."""
    with _stub(run_dir) as stub:
        return stub.GetPlan(controller_pb2.GetPlanRequest(), timeout=_READ_TIMEOUT_S)


def _steps(
    run_dir: Path, call: "Callable[[controller_pb2_grpc.ControllerServiceStub], Iterable[Any]]"
) -> Iterator[str]:
    with _stub(run_dir) as stub:
        for step in call(stub):
            yield step.text


@contextmanager
def _stub(run_dir: Path) -> "Iterator[controller_pb2_grpc.ControllerServiceStub]":
    """Connect to the control socket. Errors of calls inside the block are raised as KvrelayError."""
    with grpc.insecure_channel(f"unix:{socket_path(run_dir)}") as channel:
        try:
            yield controller_pb2_grpc.ControllerServiceStub(channel)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
