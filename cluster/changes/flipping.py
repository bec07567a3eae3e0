"""Workers change their pool instead of being stopped in one and started in the other: model and cached KV stay.

1. A worker drains as one that goes does: its answers move, and it gets nothing new.
2. It leaves the membership, is given the other role when it is empty (`WorkerService.SetRole`), and is a member again.
3. Routers describe it anew and take its cache from a snapshot.

Only where both pools have the same kind of workers (`flip_obstacle`). The last of a pool stays in it: it
cannot drain while requests come. One that is not empty in time serves on in its old role.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from cluster.processes.managed_process import ManagedProcess
from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig
from common.errors import EngineFault, KvrelayError

_SETTLE_S = 5.0
"""For what ends behind an answer that has moved: calls on their way out, and pulls from the worker's cache."""


class Flips(Enum):
    """Whether workers may change their pool."""

    FIRST = "first"
    """Before any is started or stopped."""
    NEVER = "never"


class Flippable(Protocol):
    """What flipping asks of the workers of a running cluster (see `scaling.Workforce`)."""

    def workers(self, role: ProcessRole) -> Sequence[ManagedProcess]:
        """Return a pool, whoever should go first at the end."""

    async def drain_worker(self, process: ManagedProcess, *, grace_s: float) -> int:
        """Let a worker give its requests away; returns how many it still had when the grace was over."""

    async def flip_worker(self, process: ManagedProcess, role: ProcessRole, *, grace_s: float) -> None:
        """Give a drained worker the other role; returns when the routers use it.

        Raises EngineFault when they do not, another KvrelayError when the worker still has its old role, and serves.
        """


Obstacle = Callable[[ProcessSpec, ProcessRole], str | None]
"""Returns why a worker cannot have a role, or None."""


def flip_obstacle(spec: ProcessSpec, role: ProcessRole, *, first: ServingConfig, latest: ServingConfig) -> str | None:
    """Return why a worker cannot become what a new worker of the other pool would be, or None.

    `first` is what workers serve by whose spec says nothing else, `latest` what new ones serve by: after a rollout that
    did not touch a worker it still knows the other pool's section as it was.
    """
    if (different := latest.pools.flip_obstacle) is not None:
        return different
    mine, new = (
        getattr(config.pools, role).model_copy(update={"count": 0}) for config in (spec.config or first, latest)
    )
    return None if mine == new else f"{spec.name} was started with another pools.{role}"


async def flip_workers(
    workforce: Flippable,
    sizes: Mapping[ProcessRole, int],
    *,
    obstacle: Obstacle,
    grace_s: float,
    report: Callable[[str], None],
) -> None:
    """Move workers from a pool that is too large for `sizes` to one that is too small, as far as that goes.

    Side by side: every pool keeps at least the smaller of what it has and what it shall have. Raises EngineFault when
    the routers do not use one that has flipped.
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
    workforce: Flippable,
    process: ManagedProcess,
    role: ProcessRole,
    *,
    grace_s: float,
    report: Callable[[str], None],
) -> None:
    name, source = process.spec.name, process.spec.role
    report(f"flipping {name} to {role}")
    started_s = time.monotonic()
    num_left = await workforce.drain_worker(process, grace_s=grace_s)
    try:
        await workforce.flip_worker(process, role, grace_s=_SETTLE_S)
    except EngineFault:
        raise
    except KvrelayError as error:
        left = f" with {num_left} requests that had not moved" if num_left else ""
        report(f"{name} stays in {source}{left}: {error}")
    else:
        report(f"{name} serves {role} after {time.monotonic() - started_s:.2f} s")
