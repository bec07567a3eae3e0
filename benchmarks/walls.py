"""Checks whether `kvrelay why` names the wall that a cluster was driven into, and whether its suggested change helps.

    python -m benchmarks.walls [--seconds 30] [--only cause ...] [--json FILE]

Method. For each situation a cluster of the default model (local launcher, one thread a worker) is started and loaded
for some seconds with requests of random token ids (seeded) from as many clients as the situation says, each of which
sends its next request when the last one is answered. Then the router is asked for its diagnosis of the last minute.
Where a change of the configuration is suggested, the same load runs again on a cluster with the change. The report
tells which cause was named first, what the change was predicted to bring, and the loss before and after it. Exit code 1
when a situation is not named rightly.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.faults import throttled
from kvrelay.client import AsyncClient, Diagnosis, Finding

_VOCAB = (1000, 40_000)
_WINDOW_S = 60.0
_KEYS = {"hot": "benchmark-key-of-hot", "calm": "benchmark-key-of-calm", "head": "benchmark-key-of-head"}
_TIMES_SLOWER = 6.0
_AUTH = {"auth": "api_key", "salt_secret": "benchmark secret of enough characters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Equal clients, each with one request at a time."""

    num_clients: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_prompts: int | None = None
    """Prompts that the clients ask for in turn; None: each is new."""
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A wall, and how a cluster is driven into it."""

    cause: str
    """Name of the cause that has to come first."""
    loads: Sequence[Load]
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    changed: Mapping[str, Mapping[str, Any]] | None = None
    """Pools after the change; None: no change of sizes helps."""
    is_throttled: bool = False
    """Whether one decode worker is slowed down."""


SITUATIONS = (
    Situation(
        cause="prefill",
        loads=[Load(num_clients=6, num_prompt_tokens=1500, num_output_tokens=4)],
        changed={"prefill": {"count": 2}},
    ),
    Situation(
        cause="decode",
        loads=[Load(num_clients=24, num_prompt_tokens=64, num_output_tokens=200)],
        changed={"decode": {"count": 2}},
    ),
    Situation(
        cause="cache_evictions",
        loads=[Load(num_clients=1, num_prompt_tokens=800, num_output_tokens=4, num_prompts=8)],
        pools={"prefill": {"num_blocks": 300, "kv_memory_gib": "auto"}},
        changed={"prefill": {"num_blocks": 600, "kv_memory_gib": "auto"}},
    ),
    Situation(
        cause="slow_worker",
        loads=[Load(num_clients=4, num_prompt_tokens=64, num_output_tokens=60)],
        pools={"decode": {"count": 2, "slow_drain_s": None}},
        is_throttled=True,
    ),
    Situation(
        cause="hot_tenant",
        loads=[
            Load(num_clients=6, num_prompt_tokens=1500, num_output_tokens=4, tenant="hot"),
            Load(num_clients=1, num_prompt_tokens=300, num_output_tokens=4, tenant="calm"),
        ],
    ),
)


async def _send(address: str, load: Load, until_s: float, rng: np.random.Generator) -> None:
    """Send requests until a time."""
    key = None if load.tenant is None else _KEYS[load.tenant]
    prompts = [rng.integers(*_VOCAB, load.num_prompt_tokens).tolist() for _ in range(load.num_prompts or 0)]
    turn = 0
    async with AsyncClient(address, timeout_s=120, api_key=key) as client:
        while time.monotonic() < until_s:
            prompt = prompts[turn % len(prompts)] if prompts else rng.integers(*_VOCAB, load.num_prompt_tokens).tolist()
            turn += 1
            await client.generate(prompt, max_tokens=load.num_output_tokens, temperature=0, ignore_eos=True)


async def _diagnose(address: str, situation: Situation, *, seconds: float) -> Diagnosis:
    """Drive the cluster into the situation and return what its router says."""
    until_s = time.monotonic() + seconds
    clients = [load for load in situation.loads for _ in range(load.num_clients)]
    key = _KEYS["head"] if any(load.tenant for load in situation.loads) else None
    async with AsyncClient(address, timeout_s=30, api_key=key) as head, asyncio.TaskGroup() as group:
        with ExitStack() as stack:
            if situation.is_throttled:
                victims = [view for view in (await head.status()).workers if view.role == "decode" and view.status]
                assert victims[-1].status is not None
                stack.enter_context(throttled(victims[-1].status.pid, times=_TIMES_SLOWER))
            sending = [
                group.create_task(_send(address, load, until_s, np.random.default_rng(seed)))
                for seed, load in enumerate(clients)
            ]
            await asyncio.sleep(until_s - time.monotonic())
            diagnosis = await head.diagnose(window_s=_WINDOW_S)
        await asyncio.gather(*sending)
    return diagnosis


def _run(
    situation: Situation, pools: Mapping[str, Mapping[str, Any]], *, seconds: float, console: Console
) -> Diagnosis:
    """Return the diagnosis of a cluster with these pools."""
    has_tenants = any(load.tenant for load in situation.loads)
    tenants = [
        {"name": name, "api_keys": [key], "operator": name == "head"} for name, key in _KEYS.items() if has_tenants
    ]
    named = {name: dict(ONE_THREAD_EACH[name]) | dict(pools.get(name, {})) for name in ("prefill", "decode")}
    router = _AUTH if has_tenants else {}
    with running_doors(launcher="local", pools=named, router=router, tenants=tenants, console=console) as (info, _):
        return asyncio.run(_diagnose(info.address, situation, seconds=seconds))


def _find(diagnosis: Diagnosis, cause: str) -> Finding | None:
    return next((finding for finding in diagnosis.findings if finding.cause == cause), None)


def _measure(situation: Situation, *, seconds: float, console: Console) -> dict[str, Any]:
    """Run a situation, and again with the change; returns the row of the table."""
    before = _run(situation, situation.pools, seconds=seconds, console=console)
    named = [finding.cause for finding in before.findings]
    first = _find(before, situation.cause)
    row: dict[str, Any] = {
        "situation": situation.cause,
        "named": named,
        "headline": before.headline,
        "text": first.text if first else "",
        "changes": list(first.changes) if first else [],
        "lost_s": first.lost_s if first else 0.0,
    }
    if situation.changed is not None:
        after = _run(situation, situation.changed, seconds=seconds, console=console)
        left = _find(after, situation.cause)
        row |= {"headline_after": after.headline, "lost_after_s": left.lost_s if left else 0.0}
    return row


def _report(rows: Sequence[Mapping[str, Any]], console: Console) -> bool:
    """Print what was named; returns whether every situation was named first."""
    for row in rows:
        is_right = row["named"][:1] == [row["situation"]]
        console.print(f"\n{row['situation']}: {'named first' if is_right else 'NOT FIRST'} of {row['named']}")
        console.print(f"  {row['headline']}\n  {row['text']}")
        for change in row["changes"]:
            console.print(f"  - {change}")
        if "lost_after_s" in row:
            console.print(f"  lost by it: {row['lost_s']:.3g} s, after the change {row['lost_after_s']:.3g} s")
            console.print(f"  {row['headline_after']}")
    return all(row["named"][:1] == [row["situation"]] for row in rows)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("walls", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="load of each situation (default 30)")
    names = [situation.cause for situation in SITUATIONS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="situations (default all)")
    args = parser.parse_args()
    console = terminal()
    rows = [
        _measure(situation, seconds=args.seconds, console=console)
        for situation in SITUATIONS
        if situation.cause in args.only
    ]
    is_right = _report(rows, console)
    write_json(args.json, {"method": "benchmarks/walls.py", "machine": machine(), "situations": rows})
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
