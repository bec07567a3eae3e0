"""The rounds of a row: streams in whose middle the fault comes, and the same streams undisturbed."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from rich.console import Console

from benchmarks.answers import Answer, differences, read, story
from benchmarks.faults import Fault
from benchmarks.figures import Figures
from benchmarks.recovery.others import OtherHurt
from benchmarks.recovery.targets import Target
from benchmarks.recovery.workers import WorkerHurt
from cluster.processes.life import LONG_LIFE_S
from kvrelay.client import AsyncClient, Token
from worker.step_watch import HUNG_S

_NUM_BEGUN = 5
"""Tokens of every stream before the fault."""
_NUM_REPEATS = {"prefill": 40}
"""Length of the prompts by victim, in sentences."""
_LIVES_S = {Fault.KILL: LONG_LIFE_S} | dict.fromkeys((Fault.STOP, Fault.HANG, Fault.CUT), LONG_LIFE_S - HUNG_S)
"""Time before a fault: a process that dies sooner than `LONG_LIFE_S` after its start comes back later and later. The
quiet faults end it after `HUNG_S`."""
_WARM_UP = 10_000


class Hurt(Protocol):
    """A fault of one process after the other."""

    async def prepare(self) -> None:
        """Wait until the fault can come."""
        ...

    async def inflict(self, begun: Sequence[asyncio.Event]) -> dict[str, float]:
        """Hurt the victim; returns, once it is back, how long what followed took, by name.

        `begun`: an event of each stream, which is set when it has its first tokens or has failed.
        """
        ...


async def _streams(target: Target, number: int, hurt: Hurt | None) -> tuple[list[Answer], dict[str, float]]:
    """Send the streams of a round, in turn through each router; returns the answers, and what the fault took."""
    plan, addresses = target.plan, target.addresses
    first, begun = number * plan.num_streams, [asyncio.Event() for _ in range(plan.num_streams)]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient([*addresses[at:], *addresses[:at]], timeout_s=600, tls=target.tls)
            )
            for at in range(len(addresses))
        ]
        asking = [
            asyncio.create_task(_ask(clients[idx % len(clients)], target, first + idx, event))
            for idx, event in enumerate(begun)
        ]
        times = {} if hurt is None else await hurt.inflict(begun)
        return await asyncio.gather(*asking), times


async def _ask(client: AsyncClient, target: Target, number: int, begun: asyncio.Event) -> Answer:
    def on_token(token: Token) -> None:
        if token.token_index + 1 >= _NUM_BEGUN:
            begun.set()

    plan = target.plan
    num_repeats = _NUM_REPEATS.get(plan.victim, 6)
    answer = await read(story(client, number, num_tokens=plan.num_tokens, num_repeats=num_repeats), on_token=on_token)
    begun.set()
    return answer


async def measure(target: Target, figures: Figures, *, num_rounds: int, console: Console) -> bool:
    """Run the rounds; returns whether nothing failed and no text differs."""
    is_clean = True
    await _streams(target, _WARM_UP, None)
    async with target.client(target.addresses[-1]) as client:
        hurt: Hurt = WorkerHurt(target, client) if target.plan.hurts_worker else OtherHurt(target, client)
        for number in range(num_rounds):
            await hurt.prepare()
            await asyncio.sleep(_LIVES_S.get(target.plan.fault, 0.0))
            answers, times = await _streams(target, number, hurt)
            calm, _ = await _streams(target, number, None)
            is_clean = _add(target, (answers, calm), times, figures, console) and is_clean
    return is_clean


def _add(
    target: Target,
    passes: tuple[list[Answer], list[Answer]],
    times: dict[str, float],
    figures: Figures,
    console: Console,
) -> bool:
    """Add a round to the figures; returns whether it is clean. `passes`: hurt, and undisturbed."""
    hurt, calm = passes
    failures, num_different = differences(hurt, calm)
    case, num_routers = target.plan.case, len(target.addresses)
    console.print(f"{case}: {len(hurt)} streams, {len(failures)} failed, {num_different} texts differ; {times}")
    for failure in failures:
        console.print(failure)
    groups = {f"clients of router-{at}": hurt[at::num_routers] for at in range(num_routers)}
    for arm, answers in (groups | {"undisturbed": calm}).items():
        figures.add(
            "streams",
            case,
            arm,
            largest_gap_s=max(answer.largest_gap_s for answer in answers),
            largest_TTFT_s=max(answer.ttft_s for answer in answers if answer.stamps_s),
        )
    figures.add("texts", case, target.plan.victim, failed=len(failures), differ=num_different)
    figures.add("back", case, target.plan.victim, **times)
    return not failures and not num_different
