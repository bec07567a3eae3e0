"""Serves the control socket of a running supervisor: gRPC on a Unix socket in the run folder, for its owner alone."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml

from cluster.changes.change import ChangeKind, Changes, ChangeState, ClusterChange
from cluster.changes.planning import Planning
from cluster.changes.rollout import Rollouts, RolloutTerms
from cluster.changes.scaling import Report, Scaler, check_sizes, in_words
from cluster.control import DEFAULT_GRACE_S, socket_path
from cluster.processes.plan import POOLS
from cluster.processes.run_dir import FILE_NAME
from common.config import ConfigError, ServingConfig, parse_config
from common.errors import InvalidRequest
from common.rpc import error_boundary, unix_address
from kvrelay.v1 import controller_pb2, controller_pb2_grpc

MAX_GRACE_S = 3600.0
MAX_CANARY_S = 24 * 3600.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Parts of the supervisor that the calls of the socket act on."""

    scaler: Scaler
    rollouts: Rollouts
    planning: Planning
    changes: Changes
    stop: Callable[[], None]
    """Ends the cluster."""


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """Serves `kvrelay scale`, `restart`, `rollout`, `changes`, `cancel`, `plan` and `down`."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._changes = controls.changes

    async def Scale(self, request: controller_pb2.ScaleRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        wanted = {
            role: getattr(request, role)
            for role in POOLS
            if request.HasField(role.value)  # type: ignore[arg-type]  # the pools' names are the fields'
        }
        async with error_boundary(context, "Scale"):
            grace_s = _grace_s(request.grace_s)
            check_sizes(wanted)

            async def work(report: Report) -> None:
                if not request.force:
                    await self._controls.planning.guard.check(wanted)
                await self._controls.scaler.scale(wanted, grace_s=grace_s, no_flip=request.no_flip, report=report)

            change = self._changes.begin(ChangeKind.SCALE, in_words(wanted), wanted, work)
            await _follow(change, context, controller_pb2.ScaleResponse)

    async def RestartWorkers(  # type: ignore[override]  # noqa: D102
        self, request: controller_pb2.RestartWorkersRequest, context: Context
    ) -> None:
        async with error_boundary(context, "RestartWorkers"):
            grace_s = _grace_s(request.grace_s)

            async def work(report: Report) -> None:
                await self._controls.rollouts.restart(grace_s=grace_s, report=report)

            change = self._changes.begin(ChangeKind.RESTART, "of every worker", POOLS, work)
            await _follow(change, context, controller_pb2.RestartWorkersResponse)

    async def ListChanges(  # noqa: D102
        self, request: controller_pb2.ListChangesRequest, context: Context
    ) -> controller_pb2.ListChangesResponse:
        return controller_pb2.ListChangesResponse(
            changes=[_record(change, took_s=self._changes.took_s(change)) for change in self._changes.newest_first()]
        )

    async def CancelChange(  # type: ignore[override]  # noqa: D102
        self, request: controller_pb2.CancelChangeRequest, context: Context
    ) -> None:
        async with error_boundary(context, "CancelChange"):
            change = self._changes[request.id]
            num_steps = len(change.steps)
            self._changes.cancel(change)
            async for step in change.follow(after=num_steps):
                await context.write(controller_pb2.CancelChangeResponse(text=step))
            if change.state is ChangeState.FAILED:
                await change.result()
            too_late = "" if change.state is ChangeState.CANCELLED else ": it was done before it could be cancelled"
            await context.write(controller_pb2.CancelChangeResponse(text=f"{change} is {change.state}{too_late}"))

    async def GetPlan(  # noqa: D102
        self, request: controller_pb2.GetPlanRequest, context: Context
    ) -> controller_pb2.GetPlanResponse:
        async with error_boundary(context, "GetPlan"):
            return self._controls.planning.autopilot.response()

    async def Rollout(self, request: controller_pb2.RolloutRequest, context: Context) -> None:  # type: ignore[override]  # noqa: D102
        async with error_boundary(context, "Rollout"):
            wanted, terms = _wanted(request), _terms(request)
            if request.dry_run:
                await self._preview(wanted, context)
                return

            async def work(report: Report) -> None:
                await self._controls.rollouts.run(wanted, terms, report=report)

            change = self._changes.begin(ChangeKind.ROLLOUT, f"with a canary of {terms.canary_s:g} s", POOLS, work)
            await _follow(change, context, controller_pb2.RolloutResponse)

    async def Stop(  # noqa: D102
        self, request: controller_pb2.StopRequest, context: Context
    ) -> controller_pb2.StopResponse:
        self._controls.stop()
        return controller_pb2.StopResponse()

    async def _preview(self, wanted: ServingConfig, context: Context) -> None:
        differences: list[str] = []
        try:
            await self._controls.rollouts.preview(wanted, report=differences.append)
        finally:
            for text in differences:
                await context.write(controller_pb2.RolloutResponse(text=text))


async def _follow(change: ClusterChange, context: Context, response: Callable[..., Any]) -> None:
    """Write a change's steps to a caller, which may leave, until it has ended. Raises what it failed with."""
    async for step in change.follow():
        await context.write(response(text=step, change_id=change.id))
    await change.result()


def _record(change: ClusterChange, *, took_s: float) -> controller_pb2.ChangeRecord:
    is_waiting = change.state is ChangeState.WAITING
    return controller_pb2.ChangeRecord(
        id=change.id,
        kind=change.kind,
        description=change.description,
        state=change.state,
        waits_for=[each.id for each in change.waits_for if is_waiting and not each.state.is_end],
        begun_unix_s=change.begun_unix_s,
        took_s=took_s,
        latest_step=next(reversed(change.steps), ""),
        error="" if change.error is None else str(change.error),
    )


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


@asynccontextmanager
async def serving_control(controls: Controls, run_dir: Path) -> AsyncIterator[None]:
    """Serve while the block runs."""
    path = socket_path(run_dir)
    path.unlink(missing_ok=True)  # left by a killed supervisor: we hold the run folder's lock
    server = grpc.aio.server()
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(ControllerService(controls), server)
    with unix_address(path) as address:
        server.add_insecure_port(address)
        await server.start()
        path.chmod(0o600)
        try:
            yield
        finally:
            await server.stop(0)
            path.unlink(missing_ok=True)
