"""The targets of `benchmarks.kill`: processes, the fault, and a cluster that is started for it."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.clusters import ONE_THREAD_EACH, joined_ray, running_doors
from benchmarks.faults import Fault, PrivateNetwork
from benchmarks.hurt import WORKERS
from benchmarks.hurt_others import BACK_TIMEOUT_S
from benchmarks.ray_head import KeptHead, kept_ray
from engine.fake import FAULTS_ENV
from kvrelay.client import AsyncClient

NUM_TOKENS = {"router": 160, "controller": 200, "head": 600}
"""Length of each stream, by victim: for a controller and a head long enough to last until it is nearly back."""
SLOW_DRAIN_S = {False: 5.0, True: 1.0}
"""Grace of a slow drain, by whether it is brief."""
SLOW_TOKENS = {False: 1500, True: 500}
_PAST = {Fault.KILL: "killed", Fault.STOP: "stopped", Fault.SLOW: "slow", Fault.HANG: "hung", Fault.CUT: "cut off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Processes that are hurt, and how."""

    victims: tuple[str, ...]
    """Several are workers."""
    fault: Fault
    launcher: str = "local"
    engine: str = "torch"
    is_alone: bool = False
    is_brief: bool = False

    @property
    def hurts_workers(self) -> bool:
        """Whether the victims are workers."""
        return self.victims[0] in WORKERS

    def case(self, victim: str) -> str:
        """Return the title of a victim's figures."""
        return f"{victim} {_PAST[self.fault]}"

    @property
    def num_streams(self) -> int:
        """Streams of a round, for each victim."""
        if self.fault is Fault.HANG and self.victims[0] == "decode":
            return 24  # so many that the worker that the router picks for the poison has some
        return 8 if self.hurts_workers else 16

    def num_tokens(self, victim: str) -> int:
        """Return the tokens of each stream."""
        if self.fault is Fault.SLOW and victim == "decode":
            return SLOW_TOKENS[self.is_brief]
        return NUM_TOKENS.get(victim, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster to hurt."""

    plan: Plan
    addresses: tuple[str, ...]
    """Routers; the first one is the target when a router is to fail."""
    tls: bool | str | None = None
    """How clients connect, as `kvrelay.client.tls.Tls`."""
    pid: int | None = None
    """The process to kill or stop in a cluster that this benchmark did not start."""
    run_dir: Path | None = None
    """Run folder of a cluster that was started for the benchmark."""
    network: PrivateNetwork | None = None
    head: KeptHead | None = None

    def client(self, address: str, *, max_attempts: int = 1000) -> AsyncClient:
        """Return a client of one router; by default it waits until that is back."""
        return AsyncClient(address, timeout_s=BACK_TIMEOUT_S, max_attempts=max_attempts, tls=self.tls)


@contextmanager
def target_of(plan: Plan, console: Console, *, network: PrivateNetwork | None = None) -> Iterator[Target]:
    """Start a cluster for a plan and yield it. Cuts need a network."""
    fake: dict[str, Any] = {"engine": "fake", "fake_step_ms": 10.0, "max_model_len": 4096}
    (victim, *_), drain_s = plan.victims, SLOW_DRAIN_S[plan.is_brief]
    os.environ[FAULTS_ENV] = "1" if plan.fault is Fault.HANG else "0"
    counts = Counter(plan.victims)
    pools: dict[str, Any] = {
        pool: {"count": 1 if plan.is_alone else max(2, counts[pool] + 1), "threads": 1, "slow_drain_s": drain_s}
        for pool in WORKERS
    }
    if plan.fault is Fault.HANG and victim == "decode":
        pools["prefill"] = {"count": 0}
    if victim in ("controller", "head"):
        pools = {pool: {"count": 2, "threads": 1, "num_cpus": 1} for pool in WORKERS}
    elif not plan.hurts_workers:
        pools = ONE_THREAD_EACH
    with ExitStack() as stack:
        head: KeptHead | None = None
        if victim == "head":
            head = stack.enter_context(kept_ray(num_cpus=8))
        elif victim == "controller":
            stack.enter_context(joined_ray(num_cpus=8))
        info, _config = stack.enter_context(
            running_doors(
                launcher="ray" if victim in ("controller", "head") else plan.launcher,
                console=console,
                model=fake if plan.engine == "fake" else {"dtype": "float32"},
                pools=pools,
                router={"local_prefill_max_tokens": 32} if plan.hurts_workers else {"count": 2},
            )
        )
        yield Target(
            plan=plan, addresses=info.addresses, tls=info.tls, run_dir=info.run_dir, network=network, head=head
        )
