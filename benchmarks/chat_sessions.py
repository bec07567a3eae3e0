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
import random
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from kvrelay.client import AsyncClient, ChatMessage, Generation

NUM_SESSIONS, NUM_TURNS, NUM_SYSTEM_PROMPTS = 20, 5, 4
ANSWER_TOKENS = 32
SYSTEM_WORDS, QUESTION_WORDS = 120, 40
THINK_S = 0.2
_WORDS = ("harbour", "engine", "letter", "winter", "table", "copper", "signal", "orchard", "market", "river", "lantern")


def summary(turns: Sequence[Generation]) -> dict[str, float]:
    """Return the figures of all requests of one round under one policy."""
    predicted = [turn.plans[0].predicted_cached_tokens for turn in turns]
    found = [turn.usage.num_cached_tokens for turn in turns]
    pulled = [turn.usage.num_pulled_tokens for turn in turns]
    ttfts_s = [turn.timings.ttft_s for turn in turns]
    return {
        "requests": len(turns),
        "predicted": sum(predicted),
        "found": sum(found),
        "off_by_%": 100 * (sum(predicted) / max(1, sum(found)) - 1),
        "|error|_a_request": statistics.fmean(abs(a - b) for a, b in zip(predicted, found, strict=True)),
        "cached_%": 100 * sum(found) / sum(turn.usage.num_prompt_tokens for turn in turns),
        "pulled_tokens": sum(pulled),
        "pulls": sum(count > 0 for count in pulled),
        "TTFT_p50_ms": 1e3 * quantile(ttfts_s, 0.5),
        "TTFT_p90_ms": 1e3 * quantile(ttfts_s, 0.9),
        "ITL_p50_ms": 1e3 * statistics.median(turn.timings.mean_itl_s or 0.0 for turn in turns),
    }


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


async def _session(client: AsyncClient, rng: random.Random, system: str, gate: asyncio.Semaphore) -> list[Generation]:
    messages = [ChatMessage(role="system", content=system)]
    turns: list[Generation] = []
    for _ in range(NUM_TURNS):
        messages.append(ChatMessage(role="user", content=_text(rng, QUESTION_WORDS)))
        async with gate:
            stream = client.stream_chat(messages, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
            turns.append(await stream.result())
        messages.append(ChatMessage(role="assistant", content=turns[-1].text))
        await asyncio.sleep(rng.uniform(0.5, 1.5) * THINK_S)
    return turns


async def _run(address: str, *, seed: int, concurrency: int) -> list[Generation]:
    """Run all sessions side by side and return their turns."""
    rng = random.Random(seed)
    systems = [_text(rng, SYSTEM_WORDS) for _ in range(NUM_SYSTEM_PROMPTS)]
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client:
        sessions = [
            _session(client, random.Random(f"{seed}/{i}"), systems[i % NUM_SYSTEM_PROMPTS], gate)
            for i in range(NUM_SESSIONS)
        ]
        return [turn for session in await asyncio.gather(*sessions) for turn in session]


def _measure(args: argparse.Namespace, console: Console) -> Figures:
    model: dict[str, Any] = {"engine": "fake"} if args.engine == "fake" else {}
    pools, figures = {"prefill": {"count": 2}}, Figures()
    for number in range(args.rounds):
        for policy in args.policies.split(","):
            settings: dict[str, Any] = {
                "launcher": "local",
                "model": model,
                "pools": pools,
                "router": {"policy": policy},
            }
            with running_doors(**settings, console=console) as (info, _config):
                turns = asyncio.run(_run(info.address, seed=number, concurrency=args.concurrency))
            figures.add("sessions", "2P+1D", policy, **summary(turns))
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = command_line("chat_sessions", __doc__, rounds=2)
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="real small model, or hashes")
    parser.add_argument("--policies", default="predictive,round_robin", help="of serving.yaml's router.policy")
    parser.add_argument("--concurrency", type=int, default=4, help="turns at a time (default 4)")
    args = parser.parse_args()
    console = terminal()
    figures = _measure(args, console)
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/chat_sessions.py")


if __name__ == "__main__":
    main()
