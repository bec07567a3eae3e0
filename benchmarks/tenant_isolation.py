"""Can a tenant tell, by cached tokens or by time, what another tenant has sent? A real model, real processes.

    python -m benchmarks.tenant_isolation [--rounds 20] [--tokens 768] [--json FILE]

Method. A 1P+1D cluster of the default model (local launcher) with two tenants, a and b, that have their own API keys.
Each round draws a prompt of random token ids (seeded) that was never sent before; tenant a sends it first, so that it
is cached. Then come, in an order that rotates from round to round: `warm`, tenant a sends it again; `probe`, tenant b
sends the very same prompt; `cold`, tenant b sends another prompt of that length that was never sent. Each asks for
two tokens, one request at a time. TTFT is what the client sees. Reported are medians with the quartiles, and how well
an attacker could tell a probe from a cold prompt by its TTFT: the share of all (probe, cold) pairs in which the probe
was faster (0.5: a coin), with a bootstrap interval over rounds. As a check of the instrument, the same figure for warm
prompts must be near 1. Exit code 1 when a probe finds cached tokens, or when the interval does not hold 0.5.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.answers import read
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_json
from benchmarks.figures import spread
from kvrelay.client import AsyncClient

KEYS = {"a": "benchmark-key-of-a-01", "b": "benchmark-key-of-b-01"}
ARMS = (("warm", "a"), ("probe", "b"), ("cold", "b"))
VOCAB = (1000, 40_000)
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request."""

    round_idx: int
    arm: str
    ttft_s: float
    num_cached_tokens: int
    num_decode_cached_tokens: int
    predicted_cached_tokens: int


async def _ask(client: AsyncClient, prompt: Sequence[int], *, round_idx: int, arm: str) -> Sample:
    answer = await read(client.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True))
    usage = answer.generation.usage
    return Sample(
        round_idx=round_idx,
        arm=arm,
        ttft_s=answer.ttft_s,
        num_cached_tokens=usage.num_cached_tokens,
        num_decode_cached_tokens=usage.num_decode_cached_tokens,
        predicted_cached_tokens=answer.generation.plans[0].predicted_cached_tokens,
    )


async def _measure(address: str, *, num_rounds: int, num_tokens: int, console: Console) -> list[Sample]:
    rng = np.random.default_rng(SEED)
    samples: list[Sample] = []
    async with (
        AsyncClient(address, timeout_s=300, api_key=KEYS["a"]) as a,
        AsyncClient(address, timeout_s=300, api_key=KEYS["b"]) as b,
    ):
        clients = {"a": a, "b": b}
        for client in clients.values():
            await client.generate(rng.integers(*VOCAB, num_tokens).tolist(), max_tokens=2)
        for round_idx in range(num_rounds):
            known, fresh = (rng.integers(*VOCAB, num_tokens).tolist() for _ in range(2))
            samples.append(await _ask(a, known, round_idx=round_idx, arm="first"))
            turn = round_idx % len(ARMS)
            for arm, tenant in (*ARMS[turn:], *ARMS[:turn]):
                prompt = fresh if arm == "cold" else known
                samples.append(await _ask(clients[tenant], prompt, round_idx=round_idx, arm=arm))
            console.print(" · ".join(f"{s.arm} {s.ttft_s * 1000:.0f} ms" for s in samples[-4:]))
    return samples


def _times(samples: Sequence[Sample], arm: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array([sample.ttft_s for sample in samples if sample.arm == arm])


def telltale(samples: Sequence[Sample], arm: str) -> tuple[float, float, float]:
    """Return how often `arm` is faster than a cold prompt, with a 95 % interval: bootstrap over rounds."""
    faster = (_times(samples, arm)[:, None] < _times(samples, "cold")[None, :]).astype(float)
    rng = np.random.default_rng(SEED)
    draws = rng.integers(0, len(faster), (2000, len(faster)))
    means = [faster[np.ix_(draw, draw)].mean() for draw in draws]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(faster.mean()), float(low), float(high)


def _report(samples: Sequence[Sample], console: Console) -> bool:
    columns = ("TTFT ms, median (quartiles)", "cached", "on decode", "predicted", "faster than cold (95 %)")
    table = Table("arm", *columns, title="Largest numbers of cached tokens that each sees")
    for arm in ("first", "warm", "probe", "cold"):
        mine = [sample for sample in samples if sample.arm == arm]
        tell = "" if arm == "cold" else "{:.2f} ({:.2f}–{:.2f})".format(*telltale(samples, arm))
        table.add_row(
            arm,
            spread(_times(samples, arm).tolist(), scale=1000, percentiles=(25, 75)),
            str(max(sample.num_cached_tokens for sample in mine)),
            str(max(sample.num_decode_cached_tokens for sample in mine)),
            str(max(sample.predicted_cached_tokens for sample in mine)),
            tell,
        )
    console.print(table)
    probes = [sample for sample in samples if sample.arm == "probe"]
    found = sum(s.num_cached_tokens + s.num_decode_cached_tokens + s.predicted_cached_tokens for s in probes)
    _, low, high = telltale(samples, "probe")
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
        samples = asyncio.run(_measure(info.address, num_rounds=args.rounds, num_tokens=args.tokens, console=console))
    is_isolated = _report(samples, console)
    write_json(args.json, [asdict(sample) for sample in samples])
    sys.exit(0 if is_isolated else 1)


if __name__ == "__main__":
    main()
