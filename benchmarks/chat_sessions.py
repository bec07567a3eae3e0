"""Does the router know what the workers hold? Chats of many turns on 2P+1D, under our policy and under round robin.

    python -m benchmarks.chat_sessions [--engine torch|fake] [--policies predictive,round_robin] [--rounds 2]

Method. 20 sessions of 5 turns; the sessions share 4 system prompts. A turn sends the whole conversation so far and a
new question, waits for the answer, thinks for a moment, and goes on; the sessions run side by side, at most
`--concurrency` turns at a time. Each policy gets a fresh cluster (launcher local, gRPC clients, greedy, answers of 32
tokens), the policies take turns, and every round draws other texts.

Reported: the prompt tokens that the router predicted in caches beside those that the workers found (of first plans
only; sum, and the mean absolute difference per request), the share of prompt tokens that was not computed, how many of
these were pulled from another worker, TTFT and the gap between tokens. All processes and the client share this machine.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.clusters import running_cluster
from kvrelay.client import AsyncClient, ChatMessage, Completed, PlanChosen, Token

NUM_SESSIONS, NUM_TURNS, NUM_SYSTEM_PROMPTS = 20, 5, 4
ANSWER_TOKENS = 32
SYSTEM_WORDS, QUESTION_WORDS = 120, 40
THINK_S = 0.2
_WORDS = ("harbour", "engine", "letter", "winter", "table", "copper", "signal", "orchard", "market", "river", "lantern")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request."""

    num_prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    pulled_tokens: int
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All requests of one round under one policy."""

    policy: str
    num_requests: int
    predicted_tokens: int
    cached_tokens: int
    mean_abs_error_tokens: float
    cached_share: float
    pulled_tokens: int
    num_pulls: int
    ttft_p50_s: float
    ttft_p90_s: float
    itl_p50_s: float

    @classmethod
    def of(cls, policy: str, turns: Sequence[Turn]) -> "Outcome":
        """Add up the turns."""
        ttfts = sorted(turn.ttft_s for turn in turns)
        return cls(
            policy=policy,
            num_requests=len(turns),
            predicted_tokens=sum(turn.predicted_tokens for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            mean_abs_error_tokens=statistics.fmean(abs(t.predicted_tokens - t.cached_tokens) for t in turns),
            cached_share=sum(t.cached_tokens for t in turns) / sum(t.num_prompt_tokens for t in turns),
            pulled_tokens=sum(turn.pulled_tokens for turn in turns),
            num_pulls=sum(turn.pulled_tokens > 0 for turn in turns),
            ttft_p50_s=statistics.median(ttfts),
            ttft_p90_s=ttfts[int(0.9 * len(ttfts))],
            itl_p50_s=statistics.median(turn.itl_s for turn in turns),
        )


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


async def _turn(client: AsyncClient, messages: Sequence[ChatMessage]) -> tuple[Turn, str]:
    plan: PlanChosen | None = None
    completed: Completed | None = None
    pieces: list[str] = []
    async with client.stream_chat(messages, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True) as stream:
        async for event in stream:
            match event:
                case PlanChosen() if plan is None:
                    plan = event
                case Token():
                    pieces.append(event.text)
                case Completed():
                    completed = event
    assert plan is not None and completed is not None, "a complete answer has a plan and an end"
    usage, timings = completed.usage, completed.timings
    turn = Turn(
        num_prompt_tokens=usage.num_prompt_tokens,
        predicted_tokens=plan.predicted_cached_tokens,
        cached_tokens=usage.num_cached_tokens,
        pulled_tokens=usage.num_pulled_tokens,
        ttft_s=timings.ttft_s,
        itl_s=timings.mean_itl_s or 0.0,
    )
    return turn, "".join(pieces)


async def _session(client: AsyncClient, rng: random.Random, system: str, gate: asyncio.Semaphore) -> list[Turn]:
    messages = [ChatMessage(role="system", content=system)]
    turns: list[Turn] = []
    for _ in range(NUM_TURNS):
        messages.append(ChatMessage(role="user", content=_text(rng, QUESTION_WORDS)))
        async with gate:
            turn, answer = await _turn(client, messages)
        turns.append(turn)
        messages.append(ChatMessage(role="assistant", content=answer))
        await asyncio.sleep(rng.uniform(0.5, 1.5) * THINK_S)
    return turns


async def _run(address: str, *, policy: str, seed: int, concurrency: int) -> Outcome:
    rng = random.Random(seed)
    systems = [_text(rng, SYSTEM_WORDS) for _ in range(NUM_SYSTEM_PROMPTS)]
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client:
        sessions = [
            _session(client, random.Random(f"{seed}/{i}"), systems[i % NUM_SYSTEM_PROMPTS], gate)
            for i in range(NUM_SESSIONS)
        ]
        turns = [turn for session in await asyncio.gather(*sessions) for turn in session]
    return Outcome.of(policy, turns)


def _measure(args: argparse.Namespace, console: Console) -> list[Outcome]:
    model: dict[str, Any] = {"engine": "fake"} if args.engine == "fake" else {}
    pools: dict[str, Any] = {"prefill": {"count": 2}}
    outcomes: list[Outcome] = []
    for round_number in range(args.rounds):
        for policy in args.policies.split(","):
            router = {"policy": policy}
            with running_cluster(launcher="local", model=model, pools=pools, router=router, console=console) as (
                address,
                _config,
            ):
                run = _run(address, policy=policy, seed=round_number, concurrency=args.concurrency)
                outcomes.append(asyncio.run(run))
    return outcomes


def _report(outcomes: Sequence[Outcome], console: Console) -> None:
    columns = ("policy", "requests", "predicted", "found", "off by", "|error| a request", "cached", "pulled tokens")
    table = Table(*columns, "pulls", "TTFT p50", "p90", "ITL p50")
    for one in outcomes:
        table.add_row(
            one.policy,
            str(one.num_requests),
            str(one.predicted_tokens),
            str(one.cached_tokens),
            f"{100 * (one.predicted_tokens / max(1, one.cached_tokens) - 1):+.2f} %",
            f"{one.mean_abs_error_tokens:.1f}",
            f"{100 * one.cached_share:.1f} %",
            str(one.pulled_tokens),
            str(one.num_pulls),
            f"{1e3 * one.ttft_p50_s:.0f} ms",
            f"{1e3 * one.ttft_p90_s:.0f} ms",
            f"{1e3 * one.itl_p50_s:.1f} ms",
        )
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chat_sessions", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="real small model, or hashes")
    parser.add_argument("--policies", default="predictive,round_robin", help="of serving.yaml's router.policy")
    parser.add_argument("--rounds", type=int, default=2, help="rounds (default 2)")
    parser.add_argument("--concurrency", type=int, default=4, help="turns at a time (default 4)")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    args = parser.parse_args()
    console = Console(width=160)
    outcomes = _measure(args, console)
    _report(outcomes, console)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
