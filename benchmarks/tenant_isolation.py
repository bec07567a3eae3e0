"""Can a tenant tell, by cached tokens or by time, what another tenant has sent? A real model, real processes.

    python -m benchmarks.tenant_isolation [--rounds 20] [--tokens 768] [--json FILE]

Method. A 1P+1D cluster of the default model (local launcher) with two tenants, a and b, that have their own API keys.
Each round draws a prompt of random token ids (seeded) that was never sent before; tenant a sends it first, so that it
is cached. Then come, in an order that rotates from round to round: `warm`, tenant a sends it again; `probe`, tenant b
sends the very same prompt; `cold`, tenant b sends another prompt of that length that was never sent. Each asks for
two tokens, one request at a time. TTFT is what the client sees. The report has medians with the quartiles, and how well
an attacker could tell a probe from a cold prompt by its TTFT: the share of all (probe, cold) pairs in which the probe
was faster (0.5: a coin), with a bootstrap interval over rounds. As a check of the instrument, the same figure for warm
prompts must be near 1. Exit code 1 when a probe finds cached tokens, or when the interval does not hold 0.5.
"""

import asyncio
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from benchmarks.answers import read
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, spread
from kvrelay.client import AsyncClient

KEYS = {"a": "benchmark-key-of-a-01", "b": "benchmark-key-of-b-01"}
ARMS = (("warm", "a"), ("probe", "b"), ("cold", "b"))
VOCAB = (1000, 40_000)
SEED = 7
PART = "tenants"


async def _ask(client: AsyncClient, prompt: Sequence[int]) -> dict[str, float]:
    answer = await read(client.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True))
    usage, plan = answer.generation.usage, answer.generation.plans[0]
    return {
        "TTFT_ms": 1000 * answer.ttft_s,
        "cached": usage.num_cached_tokens,
        "cached_on_decode": usage.num_decode_cached_tokens,
        "predicted": plan.predicted_cached_tokens,
    }


async def _measure(address: str, *, num_rounds: int, num_tokens: int, console: Console) -> Figures:
    rng = np.random.default_rng(SEED)
    figures = Figures()
    async with (
        AsyncClient(address, timeout_s=300, api_key=KEYS["a"]) as a,
        AsyncClient(address, timeout_s=300, api_key=KEYS["b"]) as b,
    ):
        clients = {"a": a, "b": b}
        for client in clients.values():
            await client.generate(rng.integers(*VOCAB, num_tokens).tolist(), max_tokens=2)
        for round_idx in range(num_rounds):
            known, fresh = (rng.integers(*VOCAB, num_tokens).tolist() for _ in range(2))
            turn = round_idx % len(ARMS)
            for arm, tenant in (("first", "a"), *ARMS[turn:], *ARMS[:turn]):
                found = await _ask(clients[tenant], fresh if arm == "cold" else known)
                figures.add(PART, f"{num_tokens} tokens", arm, **found)
            console.print(f"round {round_idx + 1} of {num_rounds}")
    return figures


def _rounds(figures: Figures, arm: str, unit: str) -> list[float]:
    return next(f.rounds for f in figures.all.values() if (f.arm, f.unit) == (arm, unit))


def telltale(figures: Figures, arm: str) -> tuple[float, float, float]:
    """Return how often `arm` is faster than a cold prompt, with a 95 % interval: bootstrap over rounds."""
    mine, cold = (np.array(_rounds(figures, each, "TTFT ms")) for each in (arm, "cold"))
    faster = (mine[:, None] < cold[None, :]).astype(float)
    rng = np.random.default_rng(SEED)
    draws = rng.integers(0, len(faster), (2000, len(faster)))
    means = [faster[np.ix_(draw, draw)].mean() for draw in draws]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(faster.mean()), float(low), float(high)


def _report(figures: Figures, console: Console) -> bool:
    """Print what each arm sees; returns whether nothing tells a probe from a cold prompt."""
    figures.show(console)
    for arm in ("warm", "probe"):
        quartiles = spread(_rounds(figures, arm, "TTFT ms"), percentiles=(25, 75))
        share, low, high = telltale(figures, arm)
        console.print(
            f"{arm}: TTFT {quartiles} ms, median (quartiles);"
            f" faster than cold in {share:.2f} ({low:.2f}–{high:.2f}) of all pairs"
        )
    found = sum(sum(_rounds(figures, "probe", unit)) for unit in ("cached", "cached on decode", "predicted"))
    _, low, high = telltale(figures, "probe")
    return found == 0 and low <= 0.5 <= high


def main() -> None:
    """Run the benchmark."""
    parser = command_line("tenant_isolation", __doc__, rounds=20)
    parser.add_argument("--tokens", type=int, default=768, help="length of a prompt (default 768)")
    args = parser.parse_args()
    console = terminal()
    router = {"auth": "api_key", "salt_secret": "benchmark secret of enough characters"}
    tenants = [{"name": name, "api_keys": [key]} for name, key in KEYS.items()]
    with running_doors(launcher="local", router=router, tenants=tenants, console=console) as (info, _config):
        figures = asyncio.run(_measure(info.address, num_rounds=args.rounds, num_tokens=args.tokens, console=console))
    is_isolated = _report(figures, console)
    write_figures(args.json, figures, method="benchmarks/tenant_isolation.py")
    sys.exit(0 if is_isolated else 1)


if __name__ == "__main__":
    main()
