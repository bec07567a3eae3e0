"""Tries again and again to take over the processes of an earlier controller, which serve meanwhile without one.

A controller that left instead would not be restarted, and its processes would go on unsupervised. So any failure before
it supervises (a port that is taken, a Ray that does not answer yet, a full disk) is noted in state.json, which
`kvrelay status` shows, and in the log, and the next attempt follows after 1, 2, 4, … 30 s, until one succeeds. The same
holds for processes that are to be stopped but cannot be, since Ray does not answer.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cluster.processes.state import ClusterPhase, StateFile
from common.process import ProcessIdentity

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0

Pause = Callable[[float, asyncio.Event], Awaitable[None]]
"""Waits that many seconds, or until the event is set meanwhile."""


class TakeoverFailed(Exception):
    """The processes of an earlier life serve, but cannot be supervised yet; the message gives the reason."""


async def pause_unless(seconds: float, stopping: asyncio.Event) -> None:
    """Wait, and return early when the cluster is to stop: a `Pause`."""
    if stopping.is_set():
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


async def until_taken_over(
    attempt: Callable[[], Awaitable[None]],
    *,
    state_file: StateFile,
    report: Callable[[str], None],
    stopping: asyncio.Event,
    pause: Pause = pause_unless,
) -> None:
    """Repeat an attempt until it returns; after `stopping` is set, state.json says that the processes are to end.

    A failure that does not concern processes of an earlier life is raised.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            await attempt()
        except Exception as error:
            reason = str(error) or repr(error)
            if not _note(state_file, reason, stopping) and not isinstance(error, TakeoverFailed):
                raise
            logger.exception("the controller does not supervise the processes; next attempt in %g s", pause_s)
            report(f"the controller does not supervise the processes: {reason}; next attempt in {pause_s:g} s")
        else:
            return
        await pause(pause_s, stopping)
        if stopping.is_set():
            _note(state_file, reason, stopping)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _note(state_file: StateFile, reason: str, stopping: asyncio.Event) -> bool:
    """Write into state.json why this process does not supervise the processes there; False if there are none."""
    state, identity = state_file.read(), ProcessIdentity.of(os.getpid())
    if state is None or not state.ray_environment or state.phase is ClusterPhase.STARTING or identity is None:
        return False
    is_end = state.phase.is_end or stopping.is_set()
    phase = ClusterPhase.STOPPING if is_end else ClusterPhase.ADOPTING
    try:
        state_file.write(replace(state, supervisor=identity, phase=phase, trouble=reason))
    except OSError as error:
        logger.error("state not written: %s", error)
    return True
