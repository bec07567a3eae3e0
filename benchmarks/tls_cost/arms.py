"""The two arms, and the turns that they take."""

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack

import psutil

from benchmarks.token_router import TokenRouter, running_token_router
from benchmarks.trust import ENCRYPTED, PLAIN
from common.trust.authority import Authority, AuthoritySettings

OFF, ON = "off", "on"
SETTINGS: Mapping[str, AuthoritySettings] = {OFF: PLAIN, ON: ENCRYPTED}


def turns(num_rounds: int) -> Iterator[tuple[int, str]]:
    """Return round and arm, in order; round 0 is the warm-up."""
    for number in range(num_rounds + 1):
        for arm in (OFF, ON) if number % 2 else (ON, OFF):
            yield number, arm


async def running_arms(stack: AsyncExitStack, *, itl_ms: float) -> dict[str, tuple[Authority, TokenRouter]]:
    """Run a router of each arm, with a worker that computes nothing, until the stack is left."""
    arms = {}
    for arm, settings in SETTINGS.items():
        authority = Authority.new(settings)
        arms[arm] = authority, await stack.enter_async_context(running_token_router(authority, itl_ms=itl_ms))
    return arms


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
