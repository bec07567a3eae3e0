"""How a worker goes: routers hear of it and take away what runs here, and only then does it end.

It may go as soon as

- nothing has run for a moment: routers have had time to hear of it, whoever took an answer over to pull its KV, and
  who owns the cluster to have its hottest prefixes moved (`cluster/processes/workforce.py`); or
- no router listens, so that nobody would take anything away: they have ended, or it is no member any more; or
- its grace is over. What is left is resumed elsewhere from its tokens.

The last worker of its pool is given work all the same, and does it until then.
"""

import asyncio
import logging

from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

SETTLE_S = 1.5
"""How long nothing must have run. What a router sent before it heard arrives within that, and the owner of the cluster,
who talks to routers every second, begins to move prefixes."""


async def take_leave(runtime: WorkerRuntime, *, grace_s: float) -> None:
    """Announce the end and return when the worker may go, after `grace_s` at the latest."""
    runtime.announce_leaving()
    logger.info("leaving", extra={"grace_s": grace_s, "num_tasks": runtime.num_request_tasks})
    reasons = [asyncio.ensure_future(reason) for reason in (_until_quiet(runtime), runtime.hub.until_unwatched())]
    try:
        done, _running = await asyncio.wait(reasons, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for reason in reasons:
            reason.cancel()
        await asyncio.wait(reasons)
    if not done:
        logger.warning("going before everything has moved", extra={"num_tasks": runtime.num_request_tasks})


async def _until_quiet(runtime: WorkerRuntime) -> None:
    """Wait until nothing runs, and nothing does a moment later."""
    while True:
        await runtime.until_idle()
        await asyncio.sleep(SETTLE_S)
        if runtime.is_idle:
            return
