"""The supervisor as an actor of a Ray cluster: the controller.

It is named, detached and restarted by Ray, so that no process of ours has to stay for the cluster to be supervised. Its
next life finds again all that it needs: Ray knows the processes by name, their configuration is what the actor was
created with, and the routers are sent everything again. Routers and workers continue meanwhile. A life that cannot take
them over tries again (`cluster.takeover`): Ray restarts a controller that dies, but not one that leaves.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from cluster.processes.run_dir import FILE_NAME, RunDirTaken, lock_run_dir, log_path, make_run_dir
from cluster.processes.starter import Event, StartFailure, StartStep, Up
from cluster.processes.state import StateFile
from cluster.ray import outside
from cluster.ray.joined_ray import CONTROLLER, pinned_to, remove_workers, this_host
from cluster.ray.private_ray import NAMESPACE
from cluster.takeover import until_taken_over
from cluster.wiring import supervise
from common.config import ServingConfig, load_config
from common.log import send_output_to, setup_logging

logger = logging.getLogger(__name__)

_LOCK_RETRY_S = 0.2
_HEARD_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParams:
    """The parameters with which a controller is created and restarted."""

    config: ServingConfig
    """The resolved configuration; the run folder's file takes precedence."""
    run_dir: Path
    """Run folder on the host where `kvrelay up` ran."""
    environment: Mapping[str, str]
    """Environment that reaches the Ray cluster (`outside.joined_environment`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """Progress of a controller."""

    steps: tuple[str, ...]
    """Steps that the caller has not seen."""
    num_steps: int
    """Number of all steps."""
    outcome: Up | StartFailure | None
    """Outcome of the start; None while it goes on."""


class ControllerActor:
    """Runs `supervise` from its construction to its end. A `StartListener` that keeps the progress for callers."""

    def __init__(self, params: ControllerParams) -> None:
        os.environ.update(params.environment)
        with contextlib.suppress(OSError):  # a constructor that fails would be the actor's end
            path = log_path(params.run_dir, "supervisor")
            make_run_dir(params.run_dir)
            path.parent.mkdir(exist_ok=True)
            send_output_to(path)
        setup_logging("supervisor")
        self._name = f"{params.config.name}/{CONTROLLER} (supervisor on {this_host()})"
        self._stopping = asyncio.Event()
        self._steps: list[str] = []
        self._outcome: Up | StartFailure | None = None
        self._changed = asyncio.Event()
        """Set, and replaced, with every event."""
        self._heard = asyncio.Event()
        """Set once a caller knows the outcome."""
        self._life = asyncio.get_running_loop().create_task(self._live(params))

    def __repr__(self) -> str:
        """Return the name by which Ray's dashboard shows this actor and its calls."""
        return self._name

    async def progress(self, num_seen: int) -> StartProgress:
        """Wait for a step after the first `num_seen`, or the outcome, and return these."""
        while len(self._steps) == num_seen and self._outcome is None:
            await self._changed.wait()
        new = self._steps[num_seen:] if num_seen <= len(self._steps) else self._steps  # num_seen counts an earlier life
        if self._outcome is not None:
            self._heard.set()
        return StartProgress(steps=tuple(new), num_steps=len(self._steps), outcome=self._outcome)

    async def stop(self) -> None:
        """Stop the cluster, and then the actor. Returns at once."""
        self._heard.set()  # a caller that stops it does not ask for the outcome
        self._stopping.set()

    async def leave(self) -> None:
        """End the actor for good. Called by the actor itself only; use `stop` elsewhere."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def notify(self, event: Event) -> None:
        """Note a step of `supervise`, or its outcome."""
        if isinstance(event, StartStep):
            self._steps.append(event.text)
        else:
            self._outcome = event
        self._changed.set()
        self._changed = asyncio.Event()

    async def _live(self, params: ControllerParams) -> None:
        try:
            with ExitStack() as holding:
                await self._lock(params.run_dir, holding)
                await self._run(params)
        except RunDirTaken as error:
            self.notify(StartFailure(reason=str(error)))
        except Exception as error:
            logger.exception("the controller failed")
            self.notify(StartFailure(reason=f"the controller failed: {error!r}; see its log"))
        if self._outcome is None:
            self.notify(
                StartFailure(reason="stopped before it served")
            )  # a caller that waits for progress would keep the actor
        await self._leave()

    async def _lock(self, run_dir: Path, holding: ExitStack) -> None:
        while True:
            try:
                make_run_dir(run_dir)
                holding.enter_context(lock_run_dir(run_dir))
            except (RunDirTaken, OSError) as error:
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    raise
                # Its own last life has not ended yet, or the disk is full.
                logger.info("the run folder cannot be locked yet: %s", error)
                await asyncio.sleep(_LOCK_RETRY_S)
            else:
                return

    async def _run(self, params: ControllerParams) -> None:
        state_file = StateFile(params.run_dir)

        def report(text: str) -> None:
            self.notify(StartStep(text=text))

        attempt = partial(self._attempt, params, state_file)
        await until_taken_over(attempt, state_file=state_file, report=report, stopping=self._stopping)

    async def _attempt(self, params: ControllerParams, state_file: StateFile) -> None:
        async def confirm_end() -> None:
            await asyncio.to_thread(remove_workers, params.config.name)

        last = state_file.read()
        if last is not None and last.phase.is_end:
            # The last life ended while it stopped the processes.
            await confirm_end()
            state_file.remove()
            return
        path = params.run_dir / FILE_NAME
        await supervise(
            # A rollout changes the file for every later life.
            load_config(path) if path.exists() else params.config,
            run_dir=params.run_dir,
            listener=self,
            stopping=self._stopping,
            confirm_end=confirm_end,
        )

    async def _leave(self) -> None:
        if isinstance(self._outcome, StartFailure):
            try:
                async with asyncio.timeout(_HEARD_TIMEOUT_S):
                    await self._heard.wait()
            except TimeoutError:
                logger.info("no caller asked for the outcome")
        ray.get_runtime_context().current_actor.leave.remote()


def create_controller(config: ServingConfig, run_dir: Path) -> Any:
    """Return the controller of a cluster, created on this host if there is none. Needs a connection to Ray."""
    params = ControllerParams(config=config, run_dir=run_dir, environment=outside.joined_environment(config.launcher))
    options = {
        "name": f"{config.name}/{CONTROLLER}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 100,
        **pinned_to(this_host()),
    }
    return ray.remote(ControllerActor).options(**options).remote(params)
