"""One tenant fills the decode worker: another gets its share at once, and what is set back for it stays the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation
from tests.builders import expected_tokens, make_request
from tests.e2e.in_process import System, running_system
from tests.engine.beam_oracle import expected_beams
from tests.served_router import TIMEOUT_S

KEYS = {name: f"key-of-tenant-{name}-0001" for name in "ab"}
TENANTS = [{"name": name, "api_keys": [key]} for name, key in KEYS.items()]
NUM_PLACES = 4
SHAPE: dict[str, Any] = {"num_blocks": 2048, "max_step_tokens": 512, "max_running": NUM_PLACES, "step_s": 0.002}
NUM_TOKENS, SLOW_AT = 60, 10
"""Tokens of an answer of the tenant that fills the worker, and the one from which on they are slow."""
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}


def asked(number: int, **sampling: Any) -> tuple[str, dict[str, Any]]:
    """Return the prompt of an answer and its options."""
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": number}
    return f"answer {number}: " + "what fills a worker gives way; " * 3, options | sampling


def expected(number: int, **sampling: Any) -> list[list[int]]:
    """Return the tokens of all samples of an answer that nothing disturbs."""
    prompt, options = asked(number, **sampling)
    if "use_beam_search" in options:
        return expected_beams(make_request(prompt.encode(), **options))
    samples = range(options.pop("n", 1))
    return [expected_tokens(make_request(prompt.encode(), **options, first_sample_index=index)) for index in samples]


@dataclass(slots=True)
class Filled:
    """A system whose places answers of tenant a have, which do not end before they may."""

    system: System
    running: "asyncio.Future[list[Generation]]"
    may_read: asyncio.Event
    """Set when the client of tenant a may read more than its first messages."""

    async def end(self) -> list[Generation]:
        """Let the answers of tenant a end, and return them."""
        self.system.pace.hurry()
        self.may_read.set()
        return await self.running


async def answer(client: AsyncClient, number: int, may_read: asyncio.Event, **sampling: Any) -> Generation:
    prompt, options = asked(number, **sampling)
    async with client.stream(prompt, **options) as events:
        async for _event in events:
            await may_read.wait()
        return await events.result()


async def is_full(operator: AsyncClient) -> bool:
    """Whether an answer decodes in every place of the decode worker."""
    views = (await operator.status()).workers
    return any(view.status is not None and view.status.load.num_decoding == NUM_PLACES for view in views)


@asynccontextmanager
async def filled(
    num_answers: int, *, is_read: bool = True, direct: bool = False, **sampling: Any
) -> AsyncIterator[Filled]:
    async with (
        running_system(tenants=TENANTS, **SHAPE) as system,
        system.client(api_key=KEYS["a"], direct=direct) as client,
        system.operator() as operator,
        asyncio.timeout(TIMEOUT_S),
    ):
        system.pace.slow_down(at=SLOW_AT)
        may_read = asyncio.Event()
        if is_read:
            may_read.set()
        running = asyncio.gather(*(answer(client, number, may_read, **sampling) for number in range(num_answers)))
        while not await is_full(operator):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)
        yield Filled(system, running, may_read)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (4, {}),
    "unread": (4, {"is_read": False}),
    "direct": (4, {"direct": True}),
    "samples": (2, {"n": 2}),
    "beams": (1, {"n": 4, "use_beam_search": True}),
}


@pytest.mark.parametrize("case", CASES)
async def test_tenant_is_answered_while_another_has_every_place_and_loses_no_token(case: str) -> None:
    num_answers, options = CASES[case]
    sampling = {name: value for name, value in options.items() if name not in ("is_read", "direct")}
    async with filled(num_answers, **options) as full:
        async with full.system.client(api_key=KEYS["b"]) as client:
            short = await client.generate("me, too", **SHORT)
        assert not full.running.done(), "the places came free by themselves"
        done = await full.end()
        async with full.system.operator() as operator:
            status = (await operator.status()).router
        await full.system.until_idle()

    assert list(short.samples[0].token_ids) == expected_tokens(make_request(b"me, too", **SHORT))
    for number, each in enumerate(done):
        assert [list(sample.token_ids) for sample in each.samples] == expected(number, **sampling)
    assert {each.tenant: each.num_set_back for each in status.tenants if each.num_set_back} == {"a": 1}
    assert status.num_failed == status.num_replans == status.num_moves == 0
    assert max(len(each.plans) for each in done) > 1
