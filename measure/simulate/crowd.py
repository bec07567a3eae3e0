"""Sends the requests of a run at their times, and those that follow from them, such as the next turn of a chat."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from measure.load.records import RequestRecord
from measure.simulate.client import SimClient
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import Arrival

Progress = Callable[[int], None]
"""Called with the number of requests that have ended."""


class Crowd:
    """All users of one run. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, clients: Sequence[SimClient], *, begin_s: float, progress: Progress | None = None
    ) -> None:
        """`begin_s`: the loop's time that arrivals call 0. Clients get requests in turn."""
        self._loop = loop
        self._clients = clients
        self._begin_s = begin_s
        self._progress = progress
        self._num_asked = 0
        self._running: set[asyncio.Task[RequestRecord]] = set()
        self._num_to_come = 0
        """Requests that follow from others and are not due yet."""
        self._records: dict[int, RequestRecord] = {}
        self._all_over = asyncio.Event()

    async def serve(self, arrivals: Iterable[Arrival]) -> tuple[RequestRecord, ...]:
        """Serve a workload to the end of its last request; returns the requests in order of arrival. Called once."""
        for arrival in arrivals:
            wait_s = self._begin_s + arrival.at_s - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._ask(arrival)
        while self._running or self._num_to_come:
            self._all_over.clear()
            await self._all_over.wait()
        return tuple(self._records[index] for index in range(self._num_asked))

    def _ask(self, arrival: Arrival) -> None:
        """Send a request now."""
        index = self._num_asked
        self._num_asked += 1
        task = self._loop.create_task(self._clients[index % len(self._clients)].ask(arrival, index))
        self._running.add(task)
        task.add_done_callback(lambda task: self._end(task, arrival))

    def _end(self, task: "asyncio.Task[RequestRecord]", arrival: Arrival) -> None:
        self._running.discard(task)
        if not task.cancelled():
            record = task.result()  # raises what a bug raised
            self._records[record.index] = record
            if self._progress is not None:
                self._progress(len(self._records))
            following = None if arrival.follow_up is None else arrival.follow_up(record)
            if following is not None:
                self._num_to_come += 1
                self._loop.call_at(self._begin_s + following.at_s, self._follow, following)
        if not self._running and not self._num_to_come:
            self._all_over.set()

    def _follow(self, arrival: Arrival) -> None:
        self._num_to_come -= 1
        self._ask(arrival)
