"""kill -9 of one of two routers under eight streams: a pause for half of them, and the same texts for all."""

import asyncio
import signal
from pathlib import Path

import pytest

from cluster.processes.state import ProcessState, StateFile
from kvrelay.client import AsyncClient, Generation, Token
from tests.e2e.harness import fake_config, reporting_workers, running_cluster, until

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
NUM_TOKENS = 125


def router(folder: Path, index: int) -> ProcessState:
    state = StateFile(folder / "run").read()
    assert state is not None
    return next(process for process in state.processes if process.name == f"router-{index}")


async def answer(client: AsyncClient, number: int, begun: asyncio.Event) -> Generation:
    prompt = f"stream {number} " * 20
    async with client.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=number) as stream:
        async for event in stream:
            if isinstance(event, Token):
                begun.set()
        return await stream.result()


async def answers(clients: list[AsyncClient], begun: list[asyncio.Event]) -> list[Generation]:
    """Ask for every stream, in turn through each client; stream i sets begun[i]."""
    return await asyncio.gather(
        *(answer(clients[number % len(clients)], number, begun[number]) for number in range(NUM_STREAMS))
    )


def events() -> list[asyncio.Event]:
    return [asyncio.Event() for _ in range(NUM_STREAMS)]


async def test_streams_of_a_killed_router_end_with_the_same_texts_and_it_comes_back(
    tmp_path: Path,
) -> None:
    config = fake_config(step_ms=40.0)
    config["router"] |= {"count": 2}
    async with running_cluster(tmp_path, config) as client:
        first, second = client.addresses
        expected = [each.text for each in await answers([client], events())]
        async with AsyncClient([first, second], timeout_s=120) as one, AsyncClient([second, first]) as other:
            begun = events()
            running = asyncio.create_task(answers([one, other], begun))
            for event in begun:
                await event.wait()
            before = router(tmp_path, 0).identity
            assert before is not None
            before.signal(signal.SIGKILL)
            done = await running
            assert one.address == other.address == second

        assert [each.text for each in done] == expected
        assert max(len(each.plans) for each in done[::2]) == 2  # those of the one that was killed
        assert {len(each.plans) for each in done[1::2]} == {1}
        assert {each.usage.num_output_tokens for each in done} == {NUM_TOKENS}

        async def serves_again() -> bool:
            return router(tmp_path, 0).address != "" and router(tmp_path, 0).identity != before

        await until(serves_again, timeout_s=60, what="the killed router is back")
        async with AsyncClient(first, timeout_s=60, max_attempts=100) as again:
            workers = {view.worker_id for view in (await again.status()).workers}
            assert workers <= {"prefill-0", "decode-0"}
            assert (await again.generate("again", max_tokens=4, ignore_eos=True)).usage.num_output_tokens == 4
        async with AsyncClient(second, timeout_s=60) as left:
            status = (await left.status()).router
            assert status.num_failed == status.num_replans == 0
            held = [view.status.num_leases for view in await reporting_workers(left) if view.status is not None]
            assert held == [0, 0]
