"""Who asks: lets requests in at their times, and what follows from them, such as the next turn of a chat."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from measure.simulate.client import SimClient
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import Arrival, RequestResult

Progress = Callable[[int], None]
"""Hears how many requests have ended."""


class Crowd:
    """Everybody who asks in one run. Event loop only."""

    def __init__(
        self, loop: VirtualLoop, clients: Sequence[SimClient], *, begin_s: float, progress: Progress | None = None
    ) -> None:
        """`begin_s`: when the first arrival's time began, on the loop's clock. Clients get requests in turn."""
        self.results: list[RequestResult] = []
        """In order of arrival."""
        self._loop = loop
        self._clients = clients
        self._begin_s = begin_s
        self._progress = progress
        self._num_ended = 0
        self._running: dict[asyncio.Task[None], Arrival] = {}
        self._num_to_come = 0
        """Requests that follow from others and are not due yet."""
        self._all_over = asyncio.Event()

    async def serve(self, arrivals: Iterable[Arrival]) -> None:
        """Serve a workload; returns when its last request has ended. Called once."""
        for arrival in arrivals:
            wait_s = self._begin_s + arrival.at_s - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._ask(arrival)
        while self._running or self._num_to_come:
            self._all_over.clear()
            await self._all_over.wait()

    def _ask(self, arrival: Arrival) -> None:
        """Send a request now."""
        index = len(self.results)
        result = RequestResult(
            index=index,
            arrival_s=arrival.at_s,
            num_prompt_tokens=len(arrival.prompt),
            tenant=arrival.tenant,
            kind=arrival.kind,
        )
        self.results.append(result)
        task = self._loop.create_task(self._clients[index % len(self._clients)].ask(arrival, result))
        self._running[task] = arrival
        task.add_done_callback(lambda task: self._end(task, result))

    def _end(self, task: "asyncio.Task[None]", result: RequestResult) -> None:
        arrival = self._running.pop(task)
        self._num_ended += 1
        if self._progress is not None:
            self._progress(self._num_ended)
        if not task.cancelled():
            task.result()  # raises what a bug raised
            following = None if arrival.follow_up is None else arrival.follow_up(result)
            if following is not None:
                self._num_to_come += 1
                self._loop.call_at(self._begin_s + following.at_s, self._follow, following)
        if not self._running and not self._num_to_come:
            self._all_over.set()

    def _follow(self, arrival: Arrival) -> None:
        self._num_to_come -= 1
        self._ask(arrival)
