"""A small cluster that inputs are tried on, one after the other, and what it still holds when one is over."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from common.ids import seeded_ids
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, router_admin_pb2, sampling_pb2
from measure.simulate.chaos.oracles import leftovers
from measure.simulate.worker import endpoints
from tests.fuzz.loop import MeteredLoop
from tests.fuzz.services import ROUTER, FuzzWorker, make_http, make_network, make_router, make_worker, serve_router_at

T = TypeVar("T")
CLIENT = "client:1"
_SEED = 1
_RESTORE_S = 600.0
_SETTLING_S = (0.0, 0.1, 1.0, 5.0, 30.0)
"""Virtual time in which everything has to be given back: longer than leases and graces."""


class World:
    """A router, a prefill and a decode worker. One at a time; close with `close`."""

    def __init__(self) -> None:
        self._undoing = ExitStack()
        self._undoing.enter_context(seeded_ids(_SEED))
        self.loop = MeteredLoop()
        self._undoing.callback(self.loop.close)
        self.network = make_network(self.loop)
        self.endpoints = endpoints(1, 1)
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in virtual time."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """End everything."""
        self.run(self._aclose())
        self._undoing.close()

    @property
    def prefill(self) -> FuzzWorker:
        """The prefill worker."""
        return self.workers[0]

    @property
    def decode(self) -> FuzzWorker:
        """The decode worker."""
        return self.workers[1]

    @property
    def num_steps(self) -> int:
        """Steps that the engines have taken."""
        return sum(worker.engine.num_steps for worker in self.workers)

    def channel(self) -> Any:
        """Return a function that makes channels of a client."""
        return self.network.connect_from(CLIENT)

    async def _start(self) -> None:
        self.workers = [
            make_worker(endpoint, self.loop, self.network, steps_in_flight=1 + number)
            for number, endpoint in enumerate(self.endpoints)
        ]
        for worker in self.workers:
            worker.start()
        self.door = make_router(self.loop, self.network)
        serve_router_at(self.door, self.network)
        self.connect_http, self._connections = make_http(self.door)
        await self.restore()
        await self._warm_up()
        self._num_tasks, self._num_calls = len(_tasks()), self.network.num_calls

    async def restore(self) -> None:
        """Tell the router its members again and wait until all of them are in use."""
        fleet = self.door.parts.fleet
        self.door.is_leaving = False
        async with asyncio.timeout(_RESTORE_S):
            while fleet.set_workers(self.endpoints) < len(self.endpoints):  # noqa: ASYNC110 - the time is virtual
                await asyncio.sleep(0.1)

    async def _warm_up(self) -> None:
        """Serve one request by handoff: what is made once and kept is there from now on."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel()(ROUTER))
        sampling = sampling_pb2.SamplingParams(max_tokens=2, temperature=0)
        async for _message in stub.Generate(inference_pb2.GenerateRequest(text="x" * 60, sampling=sampling)):
            pass
        await self._settle()

    async def left(self) -> list[str]:
        """Return what is still held when everything has had the time to end."""
        for seconds in _SETTLING_S:
            await asyncio.sleep(seconds)
            if not (held := self._held()):
                return []
        return held

    async def _settle(self) -> None:
        for seconds in _SETTLING_S:
            await asyncio.sleep(seconds)

    def _held(self) -> list[str]:
        held = leftovers(self.workers, [self.door.parts])
        if hasattr(self, "_num_tasks"):
            num_calls, tasks = self.network.num_calls, _tasks()
            if num_calls > self._num_calls:
                held.append(f"{num_calls} calls are open; {self._num_calls} were before")
            if self._connections.num_open:
                held.append(f"{self._connections.num_open} HTTP connections are open")
            if len(tasks) > self._num_tasks:
                names = sorted({getattr(task.get_coro(), "__qualname__", "?") for task in tasks})
                held.append(f"{len(tasks)} tasks run; {self._num_tasks} did before: {', '.join(names)}")
        return held

    async def _aclose(self) -> None:
        await self.door.parts.fleet.aclose()
        for worker in self.workers:
            await worker.aclose()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def set_workers_request(world: World) -> router_admin_pb2.SetWorkersRequest:
    """Return the message that names the members of a world."""
    return router_admin_pb2.SetWorkersRequest(
        workers=[
            router_admin_pb2.WorkerEndpoint(worker_id=e.worker_id, role=e.role, address=e.address)
            for e in world.endpoints
        ]
    )


def _tasks() -> list["asyncio.Task[Any]"]:
    """Return the tasks that run, but for the watch of each peer that was pulled from (kv_transfer/pull.py)."""
    return [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") != "_disconnected"]
