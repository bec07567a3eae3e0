"""Runs a load test: has the workload sent, collects the records, and checks the generator."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import psutil

from common.cgroups import usable_cores
from common.clock import SystemClock
from common.errors import KvrelayError
from measure.load.dispatch import Dispatcher
from measure.load.generators import Generators
from measure.load.player import RequestTerms
from measure.load.records import Outcome, PoolSample, RequestRecord, Run, RunInfo
from measure.load.selfcheck import Evidence, judge
from measure.load.spec import LoadSpec, LoadTestFailed, Observer
from measure.load.store import in_due_order
from measure.load.targets.interface import USUAL_VOCAB, Feature, Target, TargetInfo, make_target
from measure.workload.sessions import Content

_NO_TOKEN_IDS = (
    "the server returns no token ids: later turns continue other tokens than its answers, which no cache holds"
)
_LEAD_S = 0.2
"""Time from announcing the clock of the run to its start."""
_SPECIAL_TOKENS = 1000
"""Ids at either end of a large vocabulary that prompts avoid: many tokenizers have special tokens there."""


async def run_load(spec: LoadSpec, *observers: Observer, stop: asyncio.Event | None = None) -> Run:
    """Send the workload and return the run.

    `stop` ends it early: nothing more is sent, running requests are cancelled on the server and recorded as CANCELLED,
    and the run is returned. Cancelling the call does the same without returning; observers have the records. No process
    is left on any path. Raises KvrelayError when the target cannot be used, LoadTestFailed when a generator process
    dies.
    """
    target = make_target(spec.target)
    try:
        info = await target.describe()
        return await _LoadRun(spec, observers, target, info).run(stop or asyncio.Event())
    except ExceptionGroup as group:  # from the tasks of the run: an observer that fails, or a defect
        raise group.exceptions[0] from group
    finally:
        await target.aclose()


class _LoadRun:
    """One run. `run` is called once."""

    def __init__(self, spec: LoadSpec, observers: Sequence[Observer], target: Target, info: TargetInfo) -> None:
        self._spec = spec
        self._observers = observers
        self._target = target
        self._info = info
        self._clock = SystemClock()
        self._origin_s = 0.0
        self._started_at = datetime.now(UTC)
        self._requests: list[RequestRecord] = []
        self._samples: list[PoolSample] = []
        self._notes = list(info.notes)
        if spec.slo is not None and info.takes_objectives and not spec.states_objectives:
            self._notes.append("the server was not told the objectives: it served each request by its own")
        features = target.spec.features
        if spec.workload.content is Content.TOKENS and features is not None and Feature.TOKEN_IDS not in features:
            self._notes.append(_NO_TOKEN_IDS)
        self._evidence = Evidence(max_processes=spec.processes or usable_cores())

    async def run(self, stop: asyncio.Event) -> Run:
        """Run the load test. Raises LoadTestFailed."""
        spec = self._spec
        async with asyncio.TaskGroup() as tasks:
            generators = Generators(self._target.spec, Dispatcher(spec.workload), self._clock, self._evidence, tasks)
            generators.on_record = self._note
            helpers: list[asyncio.Task[None]] = []
            try:
                await generators.start(spec.processes or 1)
                if not generators.failure:
                    self._origin_s = self._clock.monotonic() + _LEAD_S
                    helpers = [tasks.create_task(self._watch_pools()), tasks.create_task(_stop_on(stop, generators))]
                    for observer in self._observers:
                        observer.started(spec, self._info)
                    generators.begin(self._terms())
                    await generators.work(until_s=spec.workload.duration_s + spec.drain_s)
            finally:
                for helper in helpers:
                    helper.cancel()
                await generators.end()
        run = self._result(was_stopped=stop.is_set())
        if generators.failure:
            raise LoadTestFailed(generators.failure, run)
        return run

    def _terms(self) -> RequestTerms:
        spec = self._spec
        first_token, num_tokens = token_range(self._info.vocab_size)
        return RequestTerms(
            content=spec.workload.content,
            seed=spec.workload.seed,
            origin_s=self._origin_s,
            timeout_s=spec.timeout_s,
            slo=spec.slo if spec.states_objectives else None,
            first_token=first_token,
            num_tokens=num_tokens,
        )

    def _note(self, request: RequestRecord) -> None:
        numbered = replace(request, index=len(self._requests))
        self._requests.append(numbered)
        for observer in self._observers:
            observer.record(numbered)

    async def _watch_pools(self) -> None:
        """Sample the pools and the machine every `sample_period_s`."""
        psutil.cpu_percent()  # the first call only starts the measurement
        reports_pools = True
        while True:
            if reports_pools:
                with contextlib.suppress(KvrelayError):  # a missing sample is harmless; failing requests show the cause
                    reports_pools = await self._take_sample()
            await asyncio.sleep(self._spec.sample_period_s)
            self._evidence.machine_shares.append(psutil.cpu_percent() / 100)

    async def _take_sample(self) -> bool:
        """Take one sample; return whether the target reports anything."""
        sample = await self._target.sample(max(0.0, self._clock.monotonic() - self._origin_s))
        if sample is None:
            return False
        self._samples.append(sample)
        for observer in self._observers:
            observer.sample(sample)
        return True

    def _result(self, *, was_stopped: bool) -> Run:
        requests = in_due_order(self._requests)
        spec, info = self._spec, self._info
        first_s = requests[0].due_s if requests else 0.0
        last_s = max((request.end_s for request in requests), default=0.0)
        return Run(
            info=RunInfo(
                name=spec.name,
                target=self._target.name,
                system=info.system,
                model=info.model,
                workload=dict(spec.specification),
                started_at=self._started_at.isoformat(timespec="seconds"),
                duration_s=last_s - first_s,
                num_workers=info.num_workers,
                generator=judge(requests, self._evidence),
                labels=dict(spec.labels),
                told_slo=spec.slo if spec.states_objectives and info.takes_objectives else None,
                notes=(*self._notes, *_remarks(requests, spec.drain_s, was_stopped=was_stopped)),
            ),
            requests=requests,
            samples=tuple(self._samples),
        )


def token_range(vocab_size: int | None) -> tuple[int, int]:
    """Return the first token id that prompts use, and their number: ordinary words in most vocabularies."""
    if vocab_size is None:
        vocab_size = USUAL_VOCAB
    margin = min(_SPECIAL_TOKENS, vocab_size // 10)
    return margin, vocab_size - 2 * margin


async def _stop_on(stop: asyncio.Event, generators: Generators) -> None:
    await stop.wait()
    generators.stop()


def _remarks(requests: tuple[RequestRecord, ...], drain_s: float, *, was_stopped: bool) -> list[str]:
    """Return remarks on how the run ended, and on its answers."""
    remarks = []
    num_cancelled = sum(request.outcome is Outcome.CANCELLED for request in requests)
    if was_stopped:
        remarks.append(f"ended early by its user; {num_cancelled} requests were cancelled")
    elif num_cancelled:
        remarks.append(
            f"{num_cancelled} requests ran longer than {drain_s:g} s after the load ended, and were cancelled"
        )
    answered = [request for request in requests if request.is_complete]
    num_other = sum(request.num_output_tokens != request.num_wanted_tokens for request in answered)
    if num_other:
        remarks.append(f"{num_other} of {len(answered)} answers have another length than asked for")
    return remarks
