"""Starts the controller of a cluster in a Ray cluster, and removes the actors of a lost one.

    python -m cluster.ray.bootstrap find NAME | remove NAME

prints the actors of a cluster as a JSON list, and with `remove` ends them first. RAY_ADDRESS names the Ray cluster. The
exit status is 1, and the reason on stderr, if Ray does not answer or still has them.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.ray import outside

outside.prepare_to_join()

import ray  # noqa: E402 - reads its settings when it is imported
from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # noqa: E402

from cluster.processes.starter import Starter, StartFailure, StartStep, Up  # noqa: E402
from cluster.ray.controller_actor import StartProgress, create_controller  # noqa: E402
from cluster.ray.joined_ray import CONTROLLER, ActorsLeft, named_actors, remove_actors  # noqa: E402
from cluster.ray.private_ray import NAMESPACE, driver_of  # noqa: E402
from common.config import ServingConfig  # noqa: E402

_RETRY_S = 0.05
_STOP_TIMEOUT_S = 50.0
_LEAVE_TIMEOUT_S = 10.0


def connect(cluster: str) -> None:
    """Connect to the Ray cluster that RAY_ADDRESS names, on behalf of a cluster of ours. Raises ConnectionError."""
    address = os.environ["RAY_ADDRESS"]
    try:
        with driver_of(cluster) as job:
            ray.init(address=address, namespace=NAMESPACE, job_config=job, log_to_driver=False, configure_logging=False)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise ConnectionError(f"Ray at RAY_ADDRESS={address}: {error}") from error


async def bring_up_controller(
    config: ServingConfig, *, run_dir: Path, starter: Starter, stopping: asyncio.Event
) -> int:
    """Make sure that the cluster has a controller, and forward its progress. Returns the exit status.

    `stopping`, set before the cluster serves, ends the cluster. Afterwards this process is not needed any more.
    """
    try:
        connect(config.name)
    except ConnectionError as error:
        starter.notify(StartFailure(reason=str(error)))
        return 1
    try:
        there_before = named_actors(config.name)
        if CONTROLLER in there_before:
            starter.notify(StartStep(text="a controller is there already"))
        controller = create_controller(config, run_dir)
        outcome = await _outcome(controller, starter, stopping, is_new=not there_before)
        if isinstance(outcome, StartFailure):
            await _until_gone(config.name)
    except RayActorError as error:
        # Ray gave it up, so its processes have no supervisor any more.
        with contextlib.suppress(ActorsLeft):
            remove_actors(config.name)
        outcome = StartFailure(reason=f"the controller died: {error}")
    finally:
        await asyncio.to_thread(ray.shutdown)
    starter.notify(outcome)
    return 0 if isinstance(outcome, Up) else 1


async def _outcome(controller: Any, starter: Starter, stopping: asyncio.Event, *, is_new: bool) -> Up | StartFailure:
    """Wait for the controller's outcome. If `stopping` is set, stop a new cluster. Raises RayActorError."""
    following = asyncio.ensure_future(_follow(controller, starter))
    interrupted = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((following, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            return following.result()
    finally:
        for task in (following, interrupted):
            task.cancel()
    if not is_new:
        return StartFailure(
            reason="interrupted; the cluster that was there before continues, and `kvrelay down` would end it"
        )
    with contextlib.suppress(TimeoutError, RayActorError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await _stop(controller)
    return StartFailure(reason="interrupted")


async def _follow(controller: Any, starter: Starter) -> Up | StartFailure:
    num_seen = 0
    while True:
        try:
            progress: StartProgress = await controller.progress.remote(num_seen)
        except ActorUnavailableError:
            await asyncio.sleep(_RETRY_S)  # Ray restarts it
            continue
        for step in progress.steps:
            starter.notify(StartStep(text=step))
        num_seen = progress.num_steps
        if progress.outcome is not None:
            return progress.outcome


async def _until_gone(cluster: str) -> None:
    """Wait until a failed controller has left, for a limited time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_TIMEOUT_S):
            while CONTROLLER in named_actors(cluster):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(_RETRY_S)


async def _stop(controller: Any) -> None:
    """Ask the controller to stop its cluster, again and again, until its end raises RayActorError."""
    while True:
        with contextlib.suppress(ActorUnavailableError):
            await controller.stop.remote()
        await asyncio.sleep(_RETRY_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Find or remove actors; see the module."""
    verb, cluster = arguments if arguments is not None else sys.argv[1:]
    try:
        connect(cluster)
        names = named_actors(cluster) if verb == "find" else remove_actors(cluster)
    except (ConnectionError, RayError, RuntimeError, ActorsLeft) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(sorted(names)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
