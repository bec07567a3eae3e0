"""The experiment of `kvrelay simulate`: placement policies are its arms, the speeds of a trace its loads."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ServingConfig
from measure.experiment.arms import ArmPlan, ArmPlans
from measure.experiment.points import Arm, Cell, Source
from measure.experiment.prepare import Experiment, check_lengths
from measure.experiment.simulated import simulation_of
from measure.experiment.spec import ExperimentError, ExperimentSpec, Shape, SimulatedArm, SimulateSpec
from measure.simulate.bound import Bound, BoundFleet, goodput_bound
from measure.workload.sessions import Content, Session, Stream, Turn, Workload
from measure.workload.traces import Trace, read_trace

_MAX_TOKENS = 2048
"""Limit that every request states: a router cannot know the length of the answer."""
_LEAST_DURATION_S = 1.0
"""Duration of a workload whose requests all come at once."""


def trace_workload(trace: Trace, *, seed: int = 0) -> Workload:
    """Return a trace's requests as sessions of one turn, without a kind."""
    sessions = [
        Session(
            index=index,
            kind="",
            start_s=request.arrival_s,
            turns=(Turn(segments=trace.segments(request), num_output_tokens=request.num_output_tokens),),
        )
        for index, request in enumerate(trace.requests)
    ]
    return Workload(
        name=trace.name,
        content=Content.TOKENS,
        streams=(Stream(kind="", sessions=sessions),),
        duration_s=max(trace.duration_s, _LEAST_DURATION_S),
        seed=seed,
    )


class ReplayedTrace:
    """A trace's requests at the times that it says, times a speed; see `prepare.SimulatedWorkloads`."""

    def __init__(self, path: Path, *, num_requests: int | None, shrink: int, seed: int) -> None:
        """`num_requests`: requests from the beginning; None: all. Raises TraceError, OSError."""
        trace = read_trace(path)
        self.trace = (trace if num_requests is None else trace.first(num_requests)).shrunk(shrink)
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        self.fingerprint: dict[str, Any] = {"trace": digest, "num_requests": num_requests, "shrink": shrink}
        self._seed = seed
        self._rate = len(self.trace.requests) / max(self.trace.duration_s, _LEAST_DURATION_S)

    def load(self, speed: float) -> float:
        """Return the mean requests per second at a speed."""
        return speed * self._rate

    def speed(self, load: float) -> float:
        """Return the speed of a load, without the error of its last digits."""
        return float(f"{load / self._rate:.12g}")

    def faster(self, load: float) -> Trace:
        """Return the trace as it is replayed at a load."""
        return self.trace.faster(self.speed(load))

    def simulated(self, cell: Cell, *, seconds: float) -> Workload:
        """Return the workload of a cell, whose duration is the trace's own."""
        return trace_workload(self.faster(cell.load), seed=self._seed)

    def longest_tokens(self) -> int:
        """Return the tokens of the longest request, its answer included."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.trace.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace under several policies."""

    trace: Path
    num_requests: int | None = None
    """Number of requests from the beginning of the trace; None: all."""
    shrink: int = 1
    """Divisor of all lengths, and of the trace's blocks."""
    speeds: tuple[float, ...] = (1.0,)
    policies: tuple[str, ...]
    serving: ServingConfig
    simulate: SimulateSpec
    seed: int = 0

    def experiment(self) -> Experiment[ReplayedTrace]:
        """Return the experiment. Raises ExperimentError, TraceError, OSError."""
        replayed = ReplayedTrace(self.trace, num_requests=self.num_requests, shrink=self.shrink, seed=self.seed)
        trace, block_size = replayed.trace, self.serving.pools.decode.block_size
        if trace.block_size % block_size:
            raise ExperimentError(
                f"pages of {block_size} tokens do not divide the trace's blocks of {trace.block_size}:"
                " shared blocks of the trace would not be shared here; choose another --block-size"
            )
        num_prefill, num_decode = self.serving.pools.prefill.count, self.serving.pools.decode.count
        shape = Shape(prefill=num_prefill, decode=num_decode) if num_prefill else Shape(workers=num_decode)
        spec = ExperimentSpec(
            name="replay",
            shapes=(shape,),
            workload={},
            loads=tuple(map(replayed.load, self.speeds)),
            repeats=1,
            duration_s=max(trace.duration_s, _LEAST_DURATION_S),
            warm_up_s=0.0,
            seed=self.seed,
            slo=self.serving.slo,
            simulate=self.simulate.model_copy(update={"max_tokens": max(1, _MAX_TOKENS // self.shrink)}),
        )
        plans = (
            ArmPlan(
                arm=Arm(name=policy, num_prefill=num_prefill, num_decode=num_decode),
                serving=self.serving,
                simulated=SimulatedArm(policy=policy),
            )
            for policy in self.policies
        )
        arms = ArmPlans(plans=tuple(plans), added=())
        found = Experiment(spec=spec, path=self.trace, source=Source.SIMULATED, arms=arms, workloads=replayed)
        check_lengths(found)
        return found


def replay_bound(experiment: Experiment[ReplayedTrace], load: float) -> Bound:
    """Return the bound for a replay's cells at one load. Takes seconds to minutes. Raises ExperimentError."""
    shape, settings = simulation_of(experiment.arms.plans[0], experiment.spec)
    fleet = BoundFleet(
        num_prefill=shape.num_prefill,
        num_decode=shape.num_decode,
        block_size=shape.block_size,
        max_step_tokens=shape.max_step_tokens,
        times=settings.decode.times,
    )
    return goodput_bound(experiment.workloads.faster(load), fleet, experiment.spec.objectives)
