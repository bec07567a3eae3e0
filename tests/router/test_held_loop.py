"""Nothing that clients send holds the event loop of a router, a process of its own here, for more than 50 ms."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.rpc import client_channel
from engine.fake import FakeExecutor
from kvrelay.client import AsyncClient
from kvrelay.v1 import router_admin_pb2, router_admin_pb2_grpc
from tests.router.heartbeat import BEAT_S, HeldLoop
from tests.router.http.clients import fetch, head
from tests.router.large_inputs import ANSWERS, COMPLETIONS, GRPC, HTTP, Input
from tests.router.processes import router_process
from tests.served_router import TIMEOUT_S
from tests.trust import as_controller_of_router
from tests.worker.cluster import running_pool

MAX_HELD_S = 0.05
_NUM_TRIES = 5
"""The shortest hold counts: the first input of a kind loads code, and a busy machine computes slowly at times."""
_NUM_AT_ONCE = 400
_NUM_LEAVING = 100
_CONFIG = "model: {engine: fake}\nrouter: {http_port: 0, metrics_port: null, silence_s: 60}\n"

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRouter:
    """A router's process, its doors, and how long its loop is held."""

    held: HeldLoop
    door: grpc.aio.Channel
    http_port: int

    async def send(self, kind: Input) -> None:
        """Send an input and read its answer, whatever it is."""
        path, make = kind
        if not path.startswith("/kvrelay."):
            await fetch(self.http_port, "POST", path, make())
            return
        call: Any = self.door.unary_stream(path)
        with suppress(grpc.aio.AioRpcError):
            async for _message in call(make(), timeout=TIMEOUT_S):
                pass

    async def longest_s(self, work: Callable[[], Awaitable[None]]) -> float:
        """Return how long the work held the loop at the least."""
        shortest_s = float("inf")
        for _ in range(_NUM_TRIES):
            await self._beats()
            self.held.forget()
            async with asyncio.timeout(TIMEOUT_S):
                await work()
            await self._beats()
            shortest_s = min(shortest_s, self.held.longest_s)
            if shortest_s < MAX_HELD_S:
                break
        return shortest_s

    async def too_long(self, kinds: Mapping[str, Input]) -> list[str]:
        """Return what holds the loop for too long, with what the router's threads did then."""
        found = []
        for name, kind in kinds.items():
            held_s = await self.longest_s(partial(self.send, kind))
            if held_s >= MAX_HELD_S:
                found.append(f"{name}: {held_s * 1e3:.0f} ms\n{self.held.stacks}")
        return found

    async def _beats(self) -> None:
        """Wait until what has been done is measured."""
        async with asyncio.timeout(TIMEOUT_S):
            num_before = self.held.num_beats
            while self.held.num_beats < num_before + 3:  # noqa: ASYNC110 - another process tells it
                await asyncio.sleep(BEAT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedRouter]:
    """A router with a heart in front of two workers of this process, whose context is long."""
    folder = tmp_path_factory.mktemp("router")
    fakes = {
        name: {
            "executor": FakeExecutor(num_blocks=60_000, block_size=16, max_model_len=1 << 17),
            "max_step_tokens": 8192,
            "max_running": 256,
        }
        for name in ("p0", "d0")
    }
    async with (
        router_process(folder, config=_CONFIG, module=("tests.router.heartbeat", str(folder / "held"))) as (_, ready),
        running_pool(fakes, ends_empty=False) as pool,
        as_controller_of_router(ready.admin_address) as admin_channel,
        client_channel(ready.address) as door,
        AsyncClient(ready.address, timeout_s=TIMEOUT_S) as client,
    ):
        admin: router_admin_pb2_grpc.RouterAdminServiceAsyncStub = router_admin_pb2_grpc.RouterAdminServiceStub(
            admin_channel
        )
        request = router_admin_pb2.SetWorkersRequest(workers=pool.endpoints)
        async with asyncio.timeout(TIMEOUT_S):
            while (await admin.SetWorkers(request)).num_ready < len(fakes):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(BEAT_S)
        status = await client.status()
        yield WatchedRouter(held=HeldLoop(folder / "held"), door=door, http_port=status.router.http_port)


async def test_no_body_at_the_http_door_holds_the_other_requests_up(watched: WatchedRouter) -> None:
    found = await watched.too_long(HTTP)
    assert not found, "\n".join(found)


async def test_no_message_at_the_grpc_door_holds_the_other_requests_up(watched: WatchedRouter) -> None:
    found = await watched.too_long(GRPC)
    assert not found, "\n".join(found)


async def test_no_large_answer_holds_the_other_requests_up(watched: WatchedRouter) -> None:
    found = await watched.too_long(ANSWERS)
    assert not found, "\n".join(found)


async def test_many_small_requests_at_once_do_not_hold_running_streams_up(watched: WatchedRouter) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()

    async def burst() -> None:
        await asyncio.gather(
            *(fetch(watched.http_port, "POST", COMPLETIONS, body) for _ in range(_NUM_AT_ONCE)), return_exceptions=True
        )

    assert await watched.longest_s(burst) < MAX_HELD_S, watched.held.stacks


async def test_many_streams_that_leave_together_do_not_hold_others_up(watched: WatchedRouter) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "logprobs": 20, "stream": True, "ignore_eos": True}).encode()

    async def begin() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", watched.http_port)
        writer.write(head("POST", COMPLETIONS, len(body)) + body)
        await reader.readuntil(b"data: ")
        return writer

    async def leave() -> None:
        for writer in await asyncio.gather(*(begin() for _ in range(_NUM_LEAVING))):
            writer.transport.abort()

    assert await watched.longest_s(leave) < MAX_HELD_S, watched.held.stacks
