"""Small clusters and workloads that the simulator's tests share."""

import asyncio
import functools
import random
from array import array
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from common.config import RouterConfig
from common.timing import StepModel, TimingModel
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import Arrival, ClusterShape, SimSettings
from measure.simulate.timing import FittedTimes, WorkerSpeed

P = ParamSpec("P")

MODEL = TimingModel(
    prefill=StepModel(
        constant_s=18e-3,
        per_prefill_token_s=5e-5,
        per_prefill_pair_s=2e-9,
        per_decode_s=1e-4,
        per_context_token_s=1e-8,
    ),
    decode=StepModel(constant_s=18e-3, per_decode_s=5e-5, per_context_token_s=2e-8),
    max_step_tokens=512,
)


def make_shape(num_prefill: int = 2, num_decode: int = 2, **changes: Any) -> ClusterShape:
    """Return a small cluster: 64 pages of 16 tokens each."""
    fields: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 16,
        "block_bytes": 16 * 1024,
        "max_step_tokens": 512,
        "max_running": 32,
        "max_model_len": 1000,
    }
    return ClusterShape(num_prefill=num_prefill, num_decode=num_decode, **(fields | changes))


def make_settings(policy: str = "predictive", **changes: Any) -> SimSettings:
    """Return settings with a linear model of time."""
    router = RouterConfig.model_validate({"policy": policy, "metrics_port": None})
    fields: dict[str, Any] = {
        "prefill": WorkerSpeed(times=FittedTimes(MODEL)),
        "decode": WorkerSpeed(times=FittedTimes(MODEL)),
        "router": router,
    }
    return SimSettings(**(fields | changes))


def make_arrivals(count: int, *, seed: int = 1, rate_per_s: float = 20.0) -> list[Arrival]:
    """Return requests that share prefixes of a few kinds."""
    draw = random.Random(seed)
    at_s = 0.0
    arrivals: list[Arrival] = []
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        shared = [1000 + draw.randrange(5)] * (16 * draw.randrange(1, 12))
        own = [draw.randrange(1000) for _ in range(draw.randrange(1, 60))]
        arrivals.append(Arrival(at_s=at_s, prompt=array("I", shared + own), num_output_tokens=draw.randrange(1, 100)))
    return arrivals


def on_virtual_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a virtual loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def current_loop() -> VirtualLoop:
    """Return the running virtual loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
