"""The rows of the table: a process and its fault, and the cluster that is started for it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.faults import Fault, PrivateNetwork
from benchmarks.recovery.ray_head import KeptHead, kept_ray
from engine.fake import FAULTS_ENV
from kvrelay.client import AsyncClient

WORKERS = ("decode", "prefill")
TIMEOUT_S = 180.0
"""How long a process may take to come back."""
_SLOW_DRAIN_S = 1.0
_NUM_TOKENS = {"router": 160, "controller": 200, "head": 600}
"""Length of each stream, by victim: for a controller and a head long enough to last until it is nearly back."""
_SLOW_TOKENS = 500
_PAST = {Fault.KILL: "killed", Fault.STOP: "stopped", Fault.SLOW: "slow", Fault.HANG: "hung", Fault.CUT: "cut off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A process that is hurt, and how."""

    victim: str
    fault: Fault

    @property
    def case(self) -> str:
        """Title of its row."""
        return f"{self.victim} {_PAST[self.fault]}"

    @property
    def hurts_worker(self) -> bool:
        """Whether the victim is a worker."""
        return self.victim in WORKERS

    @property
    def needs_ray(self) -> bool:
        """Whether the victim has a successor only in a Ray cluster."""
        return self.victim in ("controller", "head")

    @property
    def num_streams(self) -> int:
        """Streams of a round."""
        if self.fault is Fault.HANG and self.victim == "decode":
            return 24  # so many that the worker that the router picks for the poison has some
        return 8 if self.hurts_worker else 16

    @property
    def num_tokens(self) -> int:
        """Tokens of each stream."""
        if self.fault is Fault.SLOW and self.victim == "decode":
            return _SLOW_TOKENS
        return _NUM_TOKENS.get(self.victim, 128)


PLANS = (
    *(
        Plan(victim=victim, fault=fault)
        for fault in (Fault.KILL, Fault.STOP, Fault.HANG, Fault.SLOW)
        for victim in WORKERS
    ),
    *(Plan(victim=victim, fault=fault) for victim in ("router", "controller") for fault in (Fault.KILL, Fault.STOP)),
    Plan(victim="head", fault=Fault.KILL),
    # Last: they move this process into a network of its own.
    *(Plan(victim=victim, fault=Fault.CUT) for victim in WORKERS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster to hurt."""

    plan: Plan
    addresses: tuple[str, ...]
    """Routers; the first one is the target when a router is to fail."""
    run_dir: Path
    tls: bool | str | None
    """How clients connect, as `kvrelay.client.tls.Tls`."""
    network: PrivateNetwork | None
    head: KeptHead | None

    def client(self, address: str, *, max_attempts: int = 1000) -> AsyncClient:
        """Return a client of one router; by default it waits until that is back."""
        return AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=max_attempts, tls=self.tls)


@contextmanager
def target_of(plan: Plan, engine: str, console: Console, *, network: PrivateNetwork | None) -> Iterator[Target]:
    """Start a cluster for a plan and yield it. Cuts need a network."""
    fake: dict[str, Any] = {"engine": "fake", "fake_step_ms": 10.0, "max_model_len": 4096}
    os.environ[FAULTS_ENV] = "1" if plan.fault is Fault.HANG else "0"
    num_workers = 2 if plan.hurts_worker or plan.needs_ray else 1
    pools: dict[str, Any] = {
        pool: {"count": num_workers, "threads": 1, "slow_drain_s": _SLOW_DRAIN_S} for pool in WORKERS
    }
    if plan.fault is Fault.HANG and plan.victim == "decode":
        pools["prefill"] = {"count": 0}
    if plan.needs_ray:
        pools = {pool: settings | {"num_cpus": 1} for pool, settings in pools.items()}
    with ExitStack() as stack:
        head = stack.enter_context(kept_ray(num_cpus=8)) if plan.needs_ray else None
        info, _config = stack.enter_context(
            running_doors(
                launcher="ray" if plan.needs_ray else "local",
                console=console,
                model=fake if engine == "fake" else {"dtype": "float32"},
                pools=pools,
                router={"local_prefill_max_tokens": 32} if plan.hurts_worker else {"count": 2},
            )
        )
        yield Target(
            plan=plan, addresses=info.addresses, run_dir=info.run_dir, tls=info.tls, network=network, head=head
        )
