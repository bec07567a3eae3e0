"""Moves workers to the other pool without a restart, so that model and cached KV stay.

1. A worker drains: its answers move to others, and it gets nothing new.
2. It leaves the membership, gets the other role when it is empty (`WorkerService.SetRole`), and is a member again.
3. Routers describe it again and take its cache from a snapshot.

Both pools must have the same kind of workers (`flip_obstacle`). The last worker of a pool stays in it, since it cannot
drain while requests arrive. A worker that is not empty in time continues in its old role. When the change is cancelled,
a worker that drains stays in its pool, and one that changes its role completes that.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.workforce import Workforce
from common.config import ServingConfig
from common.errors import EngineFault, KvrelayError
from common.structured import completed

_SETTLE_S = 5.0
"""Time for the calls and pulls that end after the last answer has moved."""


Obstacle = Callable[[ProcessSpec, ProcessRole], str | None]
"""Returns why a worker cannot have a role, or None."""


def flip_obstacle(spec: ProcessSpec, role: ProcessRole, *, first: ServingConfig, latest: ServingConfig) -> str | None:
    """Return why a worker would differ in another role from a new worker in it, or None.

    `first` is the configuration of workers without one of their own, `latest` that of new workers: a worker that a
    rollout did not replace still has the old section of the other pool.
    """
    if (different := latest.pools.flip_obstacle) is not None:
        return different
    mine, new = (
        getattr(config.pools, role).model_copy(update={"count": 0}) for config in (spec.config or first, latest)
    )
    return None if mine == new else f"{spec.name} was started with another pools.{role}"


async def flip_workers(
    workforce: Workforce,
    sizes: Mapping[ProcessRole, int],
    *,
    obstacle: Obstacle,
    grace_s: float,
    report: Callable[[str], None],
) -> None:
    """Move as many workers as possible from a pool that is too large for `sizes` to one that is too small.

    They flip side by side, since every pool keeps the smaller of its old and new sizes. Raises EngineFault if the
    routers do not use a worker that has flipped.
    """
    for source, target in ((ProcessRole.PREFILL, ProcessRole.DECODE), (ProcessRole.DECODE, ProcessRole.PREFILL)):
        having = workforce.workers(source)
        num_flips = min(len(having) - max(1, sizes[source]), sizes[target] - len(workforce.workers(target)))
        if num_flips <= 0:
            continue
        going = having[-num_flips:]
        for why in dict.fromkeys(filter(None, (obstacle(process.spec, target) for process in going))):
            report(f"not every worker can change its pool: {why}")
        able = [process for process in going if obstacle(process.spec, target) is None]
        flips = (_flip(workforce, process, target, grace_s=grace_s, report=report) for process in able)
        done = await asyncio.gather(*flips, return_exceptions=True)
        for failure in filter(None, done):
            raise failure


async def _flip(
    workforce: Workforce,
    process: ManagedProcess,
    role: ProcessRole,
    *,
    grace_s: float,
    report: Callable[[str], None],
) -> None:
    name, source = process.spec.name, process.spec.role
    report(f"flipping {name} to {role}")
    started_s = time.monotonic()
    try:
        num_left = await workforce.drain_worker(process, grace_s=grace_s)
    except asyncio.CancelledError:
        workforce.keep_worker(process)
        raise
    try:
        await completed(workforce.flip_worker(process, role, grace_s=_SETTLE_S))
    except EngineFault:
        raise
    except KvrelayError as error:
        left = f" with {num_left} requests that had not moved" if num_left else ""
        report(f"{name} stays in {source}{left}: {error}")
    else:
        report(f"{name} serves {role} after {time.monotonic() - started_s:.2f} s")
