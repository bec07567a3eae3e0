"""The experiment of `kvrelay simulate`: placement policies are its arms; speeds, or numbers of sessions, its loads."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.config import ServingConfig
from measure.experiment.arms import ArmPlan, ArmPlans
from measure.experiment.points import Arm, Cell, LoadUnit, Source
from measure.experiment.prepare import Experiment, check_lengths, num_longest_tokens
from measure.experiment.simulated import simulation_of
from measure.experiment.spec import ExperimentError, ExperimentSpec, Shape, SimulatedArm, SimulateSpec
from measure.load.session_figures import STRETCH
from measure.simulate.bound import Bound, BoundFleet, goodput_bound
from measure.workload.build import build_workload
from measure.workload.recorded import chosen_sessions
from measure.workload.session_files import files_of
from measure.workload.sessions import Content, Session, Stream, Turn, Workload
from measure.workload.spec import ArrivalsSpec, RecordedSpec, RecordedStreamSpec, WorkloadSpec
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

    load_unit = LoadUnit.REQUESTS

    @property
    def duration_s(self) -> float:
        """Time of its arrivals."""
        return max(self.trace.duration_s, _LEAST_DURATION_S)

    def label(self, load: float) -> str:
        """Return a load in words: its speed."""
        return f"{self.speed(load):g}×"

    def num_requests(self, load: float, *, seconds: float) -> float | None:
        """Return how many requests come in a cell of a duration."""
        return load * seconds

    def simulated(self, cell: Cell, *, seconds: float) -> Workload:
        """Return the workload of a cell, whose duration is the trace's own."""
        return trace_workload(self.faster(cell.load), seed=self._seed)

    def longest_tokens(self) -> int:
        """Return the tokens of the longest request, its answer included."""
        return max(request.num_prompt_tokens + request.num_output_tokens for request in self.trace.requests)


class ReplayedSessions:
    """Recorded sessions, as many at a time as a load says, or beginning so many times an hour."""

    def __init__(self, recorded: RecordedSpec, *, load_unit: LoadUnit, ramp_s: float, seed: int) -> None:
        """Raises TraceError, WorkloadError, OSError."""
        is_closed = load_unit is LoadUnit.SESSIONS
        stream = RecordedStreamSpec(
            name="sessions",
            sessions=recorded,
            concurrency=1 if is_closed else None,
            arrivals=None if is_closed else ArrivalsSpec(rate=1 / 3600),
            ramp_s=ramp_s,
        )
        self.load_unit = load_unit
        self._spec = WorkloadSpec(name=recorded.path.stem, seed=seed, streams=(stream,))
        self._sessions = chosen_sessions(recorded)
        digest = hashlib.blake2b(digest_size=16)
        for file in files_of(recorded.path):
            digest.update(file.read_bytes())
        settings = recorded.model_dump(exclude={"path"}, exclude_defaults=True)
        self.fingerprint: dict[str, Any] = {"sessions": digest.hexdigest(), "load": load_unit.value, "ramp_s": ramp_s}
        self.fingerprint |= settings

    duration_s = _LEAST_DURATION_S
    """Sessions last as long as they last."""

    def load(self, load: float) -> float:
        """Return a load as it is."""
        return load

    def label(self, load: float) -> str:
        """Return a load in words."""
        return f"{load:g}" if self.load_unit is LoadUnit.SESSIONS else f"{load:g}/h"

    def num_requests(self, load: float, *, seconds: float) -> float | None:
        """Return the requests of all sessions."""
        return float(sum(len(session.turns) for session in self._sessions))

    def simulated(self, cell: Cell, *, seconds: float) -> Workload:
        """Return the workload of a cell, which ends with its last session."""
        if self.load_unit is LoadUnit.SESSIONS:
            return build_workload(self._spec, sessions=cell.load)
        (stream,) = self._spec.streams
        hourly = stream.model_copy(update={"arrivals": ArrivalsSpec(rate=cell.load / 3600)})
        return build_workload(self._spec.model_copy(update={"streams": (hourly,)}))

    def longest_tokens(self) -> int:
        """Return the tokens of the longest request, its answer included. Raises ExperimentError."""
        if not self._sessions:
            raise ExperimentError("no session is short enough; choose a larger --longest")
        plain = (Session(index=0, kind="", start_s=0.0, turns=session.turns) for session in self._sessions)
        return max(map(num_longest_tokens, plain))


_Replayed = TypeVar("_Replayed", bound=ReplayedTrace | ReplayedSessions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace, or recorded sessions, under several policies."""

    trace: Path
    num_requests: int | None = None
    """Number of requests from the beginning of the trace; None: all."""
    shrink: int = 1
    """Divisor of all lengths, and of the trace's blocks."""
    loads: tuple[float, ...] = (1.0,)
    """Speeds of a trace; of sessions how many run at a time, or begin in an hour."""
    recorded: RecordedSpec | None = None
    """Sessions in place of the trace's requests."""
    load_unit: LoadUnit = LoadUnit.SESSIONS
    """What the loads of sessions count."""
    ramp_s: float = 0.0
    """Time in which the first sessions of a closed loop begin."""
    stretch: float = STRETCH
    policies: tuple[str, ...]
    serving: ServingConfig
    simulate: SimulateSpec
    seed: int = 0

    def workloads(self) -> "ReplayedTrace | ReplayedSessions":
        """Return what is replayed. Raises ExperimentError, TraceError, WorkloadError, OSError."""
        if self.recorded is not None:
            return ReplayedSessions(self.recorded, load_unit=self.load_unit, ramp_s=self.ramp_s, seed=self.seed)
        return self._trace()

    def experiment(self) -> Experiment[ReplayedTrace]:
        """Return the experiment of a trace. Raises ExperimentError, TraceError, OSError."""
        return self.experiment_of(self._trace())

    def _trace(self) -> ReplayedTrace:
        replayed = ReplayedTrace(self.trace, num_requests=self.num_requests, shrink=self.shrink, seed=self.seed)
        trace, block_size = replayed.trace, self.serving.pools.decode.block_size
        if trace.block_size % block_size:
            raise ExperimentError(
                f"pages of {block_size} tokens do not divide the trace's blocks of {trace.block_size}:"
                " shared blocks of the trace would not be shared here; choose another --block-size"
            )
        return replayed

    def experiment_of(self, replayed: _Replayed) -> Experiment[_Replayed]:
        """Return the experiment with what is replayed. Raises ExperimentError."""
        num_prefill, num_decode = self.serving.pools.prefill.count, self.serving.pools.decode.count
        shape = Shape(prefill=num_prefill, decode=num_decode) if num_prefill else Shape(workers=num_decode)
        spec = ExperimentSpec(
            name="replay",
            shapes=(shape,),
            workload={},
            loads=tuple(map(replayed.load, self.loads)),
            repeats=1,
            duration_s=replayed.duration_s,
            warm_up_s=0.0,
            seed=self.seed,
            slo=self.serving.slo,
            stretch=self.stretch,
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
