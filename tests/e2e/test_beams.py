"""Beam search over handoffs, moves, deaths and direct streams: one process's answers, and nothing twice."""

import asyncio
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Generation
from router.record.record import RunningRequest
from tests.builders import make_request
from tests.e2e.in_process import System, running_system
from tests.e2e.test_drain import decoding_worker
from tests.engine.beam_oracle import expected_beams
from tests.served_router import TIMEOUT_S

PROMPT = list(b"the beams of a lighthouse " * 3)
OPTIONS: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": 100, "ignore_eos": True}
EXPECTED = expected_beams(make_request(PROMPT, **OPTIONS))
SLOW: dict[str, Any] = {"num_blocks": 512, "step_s": 0.005}
REMOTE = {"local_prefill_max_tokens": 0, "policy": "round_robin"}
LOCAL = {"local_prefill_max_tokens": 4000, "policy": "round_robin"}


def found(answer: Generation) -> list[list[int]]:
    return [list(sample.token_ids) for sample in answer.samples]


@pytest.fixture
def known_states(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[int]":
    """Return the lengths of the beams in every state that the router gets."""
    lengths: asyncio.Queue[int] = asyncio.Queue()

    def note(record: RunningRequest, name: str, value: Any) -> None:
        object.__setattr__(record, name, value)
        if name == "beams" and value is not None:
            lengths.put_nowait(len(value.live[0].tokens) // 4)

    monkeypatch.setattr(RunningRequest, "__setattr__", note)
    return lengths


async def begun(system: System, client: AsyncClient, known: "asyncio.Queue[int]") -> "asyncio.Task[Generation]":
    """Start the request; its search is known in part when this returns, and gets slow before it ends."""
    system.pace.slow_down(at=40)
    running = asyncio.create_task(client.generate(PROMPT, **OPTIONS))
    async with asyncio.timeout(TIMEOUT_S):
        assert await known.get() == 32
    return running


@pytest.mark.parametrize("router", [REMOTE, LOCAL], ids=["remote", "local"])
async def test_undisturbed_beams_are_those_of_one_process(router: dict[str, Any]) -> None:
    async with running_system(router=router) as system, system.client() as routed, system.client(direct=True) as direct:
        for client in (routed, direct, routed):  # the second and the third time the prompt is cached
            answer = await client.generate(PROMPT, **OPTIONS)
            assert found(answer) == EXPECTED
            assert answer.usage.num_output_tokens == 400
        await system.until_idle()


@pytest.mark.parametrize("router", [REMOTE, LOCAL], ids=["remote", "local"])
@pytest.mark.parametrize("direct", [False, True])
async def test_beams_whose_worker_dies_go_on_from_their_last_known_state(
    known_states: "asyncio.Queue[int]", router: dict[str, Any], direct: bool
) -> None:
    async with running_system(num_decode=2, router=router, **SLOW) as system, system.client(direct=direct) as client:
        running = await begun(system, client, known_states)
        await system.kill(await decoding_worker(client))
        system.pace.hurry()
        answer = await running
        assert found(answer) == EXPECTED
        assert len(answer.plans) == 2
        lengths = [known_states.get_nowait() for _ in range(known_states.qsize())]
        assert lengths == sorted(lengths)
        assert 32 not in lengths, "the search began again"


async def test_beams_move_from_a_worker_that_drains(known_states: "asyncio.Queue[int]") -> None:
    async with running_system(num_decode=2, router=REMOTE, **SLOW) as system, system.client() as client:
        running = await begun(system, client, known_states)
        await system.drain(await decoding_worker(client))
        system.pace.hurry()
        answer = await running
        status = (await client.status()).router
        assert found(answer) == EXPECTED
        assert len(answer.plans) == 2
        assert (status.num_replans, status.num_failed) == (0, 0)
        await system.until_idle()
