"""Asks a running supervisor, over its control socket in the run folder, which only the folder's owner can use."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.changes.rollout import RolloutTerms
from cluster.processes.run_dir import config_text
from common.config import ServingConfig
from common.errors import WorkerLost, from_rpc_error
from common.rpc import unix_address
from kvrelay.v1 import controller_pb2, controller_pb2_grpc

DEFAULT_GRACE_S = 30.0
_READ_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


class SupervisorAway(WorkerLost):
    """The supervisor does not answer on its socket: it does not serve yet, or ended meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeStep:
    """A step of a change."""

    text: str
    change_id: int = 0
    """0: it belongs to no change."""


def socket_path(run_dir: Path) -> Path:
    """Return the control socket of a cluster."""
    return run_dir / "control.sock"


def scale(
    run_dir: Path, wanted: Mapping[str, int], *, grace_s: float, force: bool = False, no_flip: bool = False
) -> Iterator[ChangeStep]:
    """Ask the supervisor of a run folder for other pool sizes; yields its steps. Raises KvrelayError.

    Without `force` it refuses sizes that would not carry the present load, or for which its host has no room.
    """
    request = controller_pb2.ScaleRequest(**wanted, grace_s=grace_s, force=force, no_flip=no_flip)
    return _steps(run_dir, lambda stub: stub.Scale(request))


def restart(run_dir: Path, *, grace_s: float) -> Iterator[ChangeStep]:
    """Ask the supervisor of a run folder to replace its workers one by one; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RestartWorkersRequest(grace_s=grace_s)
    return _steps(run_dir, lambda stub: stub.RestartWorkers(request))


def rollout(run_dir: Path, config: ServingConfig, terms: RolloutTerms) -> Iterator[ChangeStep]:
    """Ask the supervisor of a run folder for another configuration; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RolloutRequest(
        config=config_text(config),
        canary_s=terms.canary_s,
        max_slowdown=terms.max_slowdown,
        grace_s=terms.grace_s,
        force=terms.is_forced,
    )
    return _steps(run_dir, lambda stub: stub.Rollout(request))


def preview_rollout(run_dir: Path, config: ServingConfig) -> Iterator[ChangeStep]:
    """Ask what `rollout` would change and what that needs; yields its steps. Raises KvrelayError."""
    request = controller_pb2.RolloutRequest(config=config_text(config), max_slowdown=1.0, dry_run=True)
    return _steps(run_dir, lambda stub: stub.Rollout(request))


def cancel(run_dir: Path, change_id: int) -> Iterator[ChangeStep]:
    """Cancel a change and yield its steps until it has ended, and then how. Raises KvrelayError."""
    request = controller_pb2.CancelChangeRequest(id=change_id)
    return _steps(run_dir, lambda stub: stub.CancelChange(request))


def read_changes(run_dir: Path) -> controller_pb2.ListChangesResponse:
    """Return the changes of the cluster of a run folder. Raises KvrelayError."""
    with _stub(run_dir) as stub:
        return stub.ListChanges(controller_pb2.ListChangesRequest(), timeout=_READ_TIMEOUT_S)


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
) -> Iterator[ChangeStep]:
    with _stub(run_dir) as stub:
        for step in call(stub):
            yield ChangeStep(text=step.text, change_id=getattr(step, "change_id", 0))


@contextmanager
def _stub(run_dir: Path) -> "Iterator[controller_pb2_grpc.ControllerServiceStub]":
    """Connect to the control socket. Errors of calls inside the block are raised as KvrelayError."""
    try:
        with unix_address(socket_path(run_dir)) as address, grpc.insecure_channel(address) as channel:
            yield controller_pb2_grpc.ControllerServiceStub(channel)
    except grpc.RpcError as error:
        raise from_rpc_error(error, unavailable=SupervisorAway) from error
    except FileNotFoundError as error:
        raise SupervisorAway(f"its run folder {run_dir} is gone") from error
