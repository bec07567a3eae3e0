"""Runs a load test."""

import asyncio

from loadtest.records import Run
from loadtest.spec import LoadSpec, NoObserver, Observer

_NO_OBSERVER = NoObserver()


async def run_load(spec: LoadSpec, observer: Observer = _NO_OBSERVER, *, stop: asyncio.Event | None = None) -> Run:
    """Send the workload and return what was measured.

    `stop` ends it early: nothing more is sent, what runs is cancelled on the server and recorded as CANCELLED, and the
    run is returned. Cancelling the call does the same, but returns nothing: what was measured has gone to `observer`.
    Raises KvrelayError when the target cannot be used, LoadTestFailed when a generator process dies.
    """
    raise NotImplementedError
