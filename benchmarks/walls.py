"""Checks whether `kvrelay why` names the wall that a cluster was driven into, and whether its predictions come true.

    python -m benchmarks.walls [--seconds 40] [--only cause ...] [--json FILE]

Method. For each situation a cluster of the default model (local launcher, one thread a worker) is started and loaded
for some seconds with requests of random token ids (seeded) from as many clients as the situation says, each of which
sends its next request when the last one is answered. Then the router is asked for its diagnosis of the last minute.
Where it predicts a figure for another worker or for more pages, the same load runs again on a cluster that was changed
so. The report says which cause was named first, and in a table each predicted figure with its interval beside what was
found: waits and times of requests by their own reports, steps by the workers' totals. Exit code 1 when a situation is
not named rightly. Workers share the cores of the machine: with fewer idle cores than a change uses, its interval is
wide, and says so.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, machine, terminal, write_json
from benchmarks.faults import throttled
from kvrelay.client import AsyncClient, ClusterStatus, Diagnosis, Finding, Generation

_VOCAB = (1000, 40_000)
_WINDOW_S = 60.0
_KEYS = {"hot": "benchmark-key-of-hot", "calm": "benchmark-key-of-calm", "head": "benchmark-key-of-head"}
_TIMES_SLOWER = 12.0
_NO_LOCAL_PROMPTS = {"local_prefill_max_tokens": 32}
"""Decode workers compute no long prompts, which would be the help of a prefill worker more."""
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
    router: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the router."""


SITUATIONS = (
    Situation(
        cause="prefill",
        loads=[Load(num_clients=5, num_prompt_tokens=700, num_output_tokens=2)],
        changed={"prefill": {"count": 2}},
        router=_NO_LOCAL_PROMPTS,
    ),
    Situation(
        cause="decode",
        loads=[Load(num_clients=16, num_prompt_tokens=32, num_output_tokens=80)],
        changed={"decode": {"count": 2}},
    ),
    Situation(
        cause="cache_evictions",
        # More blocks than both workers hold together: else sending each prompt where it is held evicts nothing.
        loads=[Load(num_clients=1, num_prompt_tokens=330, num_output_tokens=2, num_prompts=7)],
        pools={name: {"num_blocks": 64, "kv_memory_gib": "auto"} for name in ("prefill", "decode")},
        changed={name: {"num_blocks": 128, "kv_memory_gib": "auto"} for name in ("prefill", "decode")},
    ),
    Situation(
        cause="slow_worker",
        loads=[Load(num_clients=6, num_prompt_tokens=32, num_output_tokens=60)],
        pools={"decode": {"count": 2, "slow_drain_s": None}},
        is_throttled=True,
    ),
    Situation(
        cause="hot_tenant",
        loads=[
            Load(num_clients=5, num_prompt_tokens=700, num_output_tokens=2, tenant="hot"),
            Load(num_clients=1, num_prompt_tokens=150, num_output_tokens=2, tenant="calm"),
        ],
        router=_NO_LOCAL_PROMPTS,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Diagnosis of a cluster under a load, and what was measured."""

    diagnosis: Diagnosis
    found: Mapping[str, float]
    """Measured means by the name of a predicted figure; absent without any measurement."""


async def _send(address: str, load: Load, until_s: float, rng: np.random.Generator, answered: list[Generation]) -> None:
    """Send requests until a time, and note those that are answered by then."""
    key = None if load.tenant is None else _KEYS[load.tenant]
    prompts = [rng.integers(*_VOCAB, load.num_prompt_tokens).tolist() for _ in range(load.num_prompts or 0)]
    turn = 0
    async with AsyncClient(address, timeout_s=120, api_key=key) as client:
        while time.monotonic() < until_s:
            prompt = prompts[turn % len(prompts)] if prompts else rng.integers(*_VOCAB, load.num_prompt_tokens).tolist()
            turn += 1
            answer = await client.generate(prompt, max_tokens=load.num_output_tokens, temperature=0, ignore_eos=True)
            if time.monotonic() < until_s:
                answered.append(answer)


async def _drive(address: str, situation: Situation, *, seconds: float) -> Outcome:
    """Drive the cluster into the situation and return what its router says, and what was measured."""
    until_s = time.monotonic() + seconds
    clients = [load for load in situation.loads for _ in range(load.num_clients)]
    key = _KEYS["head"] if any(load.tenant for load in situation.loads) else None
    answered: list[Generation] = []
    async with AsyncClient(address, timeout_s=30, api_key=key) as head, asyncio.TaskGroup() as group:
        with ExitStack() as stack:
            if situation.is_throttled:
                victims = [view for view in (await head.status()).workers if view.role == "decode" and view.status]
                assert victims[-1].status is not None
                stack.enter_context(throttled(victims[-1].status.pid, times=_TIMES_SLOWER))
            sending = [
                group.create_task(_send(address, load, until_s, np.random.default_rng(seed), answered))
                for seed, load in enumerate(clients)
            ]
            await asyncio.sleep(until_s - time.monotonic())
            diagnosis, status = await head.diagnose(window_s=_WINDOW_S), await head.status()
        for task in sending:
            task.cancel()
    return Outcome(diagnosis=diagnosis, found=_measured(answered, status))


def _measured(answered: Sequence[Generation], status: ClusterStatus) -> Mapping[str, float]:
    """Return the means of the figures that a diagnosis predicts."""
    found: dict[str, float] = {}
    if answered:
        timings = [each.timings for each in answered]
        found["prefill_wait_s"] = fmean(each.queue_s for each in timings)
        found["request_s"] = fmean(each.e2e_s for each in timings)
    steps = [
        totals
        for view in status.workers
        if view.role == "decode" and view.status is not None
        for totals in view.status.recent_steps
        if totals.window_s == _WINDOW_S
    ]
    if num_steps := sum(each.num_decode_steps for each in steps):
        found["decode_step_s"] = sum(each.decode_s for each in steps) / num_steps
    return found


def _run(situation: Situation, pools: Mapping[str, Mapping[str, Any]], *, seconds: float, console: Console) -> Outcome:
    """Return the outcome of a cluster with these pools."""
    has_tenants = any(load.tenant for load in situation.loads)
    tenants = [
        {"name": name, "api_keys": [key], "operator": name == "head"} for name, key in _KEYS.items() if has_tenants
    ]
    named = {name: dict(ONE_THREAD_EACH[name]) | dict(pools.get(name, {})) for name in ("prefill", "decode")}
    router = dict(situation.router) | (_AUTH if has_tenants else {})
    with running_doors(launcher="local", pools=named, router=router, tenants=tenants, console=console) as (info, _):
        return asyncio.run(_drive(info.address, situation, seconds=seconds))


def _find(diagnosis: Diagnosis, cause: str) -> Finding | None:
    return next((finding for finding in diagnosis.findings if finding.cause == cause), None)


def _measure(situation: Situation, *, seconds: float, console: Console) -> dict[str, Any]:
    """Run a situation, and again with the change; returns what was named, predicted and found."""
    before = _run(situation, situation.pools, seconds=seconds, console=console)
    diagnosis = before.diagnosis
    first = _find(diagnosis, situation.cause)
    row: dict[str, Any] = {
        "situation": situation.cause,
        "named": [finding.cause for finding in diagnosis.findings],
        "headline": diagnosis.headline,
        "text": first.text if first else "",
        "changes": list(first.changes) if first else [],
        "lost_s": first.lost_s if first else 0.0,
        "predictions": [],
    }
    if situation.changed is None:
        return row
    after = _run(situation, situation.changed, seconds=seconds, console=console)
    left = _find(after.diagnosis, situation.cause)
    row |= {"headline_after": after.diagnosis.headline, "lost_after_s": left.lost_s if left else 0.0}
    row["predictions"] = [
        asdict(each) | {"before": before.found.get(each.figure), "found": after.found.get(each.figure)}
        for each in (first.predictions if first else ())
    ]
    return row


def _report(rows: Sequence[Mapping[str, Any]], console: Console) -> bool:
    """Print what was named, predicted and found; returns whether every situation was named first."""
    table = Table("situation", "change", "figure", "measured before", "predicted", "interval", "found after", "inside")
    for row in rows:
        is_right = row["named"][:1] == [row["situation"]]
        console.print(f"\n{row['situation']}: {'named first' if is_right else 'NOT FIRST'} of {row['named']}")
        console.print(f"  {row['headline']}\n  {row['text']}")
        for change in row["changes"]:
            console.print(f"  - {change}")
        if "lost_after_s" in row:
            console.print(f"  lost by it: {row['lost_s']:.3g} s, after the change {row['lost_after_s']:.3g} s")
            console.print(f"  {row['headline_after']}")
        for each in row["predictions"]:
            before, found = ("-" if value is None else f"{value:.3g}" for value in (each["before"], each["found"]))
            interval = f"{each['low']:.3g} to {each['high']:.3g}"
            is_inside = each["found"] is not None and each["low"] <= each["found"] <= each["high"]
            cells = (f"{each['expected']:.3g}", interval, found, "yes" if is_inside else "no")
            table.add_row(row["situation"], f"more: {each['change']}", each["figure"], before, *cells)
    if table.row_count:
        console.print(table)
    return all(row["named"][:1] == [row["situation"]] for row in rows)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("walls", __doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="load of each situation (default 40)")
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
