"""A leap over many steps gives exactly the same state as the steps taken one by one."""

import asyncio
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import hash_blocks, hash_root
from common.errors import KvrelayError
from common.ids import RequestId
from common.sampling import SamplingParams
from common.timing import StepModel, TimingModel
from engine.core import EngineCore
from engine.events import EngineEvent, StepReport, Tokens
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.scheduler import SchedulerLimits
from measure.simulate.engine import SimEngine
from measure.simulate.executor import KnownAnswer, SimExecutor, sim_shape
from measure.simulate.loop import VirtualClock, VirtualLoop
from measure.simulate.timing import FittedTimes, WindowPageSize
from measure.simulate.tokens import TokenLog
from tests.measure.simulate.builders import current_loop, on_virtual_loop

BLOCK = 4
ROOT = hash_root(model_fingerprint="test")
# Powers of two: sums are exact, in whatever order they are made.
TIMES = FittedTimes(
    TimingModel(
        prefill=StepModel(constant_s=2**-5, per_prefill_token_s=2**-10, per_decode_s=2**-9, per_context_token_s=2**-15),
        decode=StepModel(constant_s=2**-6, per_decode_s=2**-10, per_context_token_s=2**-14),
        max_step_tokens=16,
    )
)
OFF_GRID_S = 2**-30
"""Offset of commands from the ends of steps: simultaneous events have no order."""


@dataclass(frozen=True)
class Op:
    """A command to the engine, `wait` 1/64 seconds after the one before."""

    wait: int
    kind: str
    num_prompt: int
    num_output: int
    max_tokens: int
    which: int


class StepByStep:
    """An executor that the engine does not know to be a simulated one."""

    def __init__(self, inner: SimExecutor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Outcome:
    """Everything that can be seen of an engine's run."""

    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    others: list[tuple[float, str, str]] = field(default_factory=list)
    ends: dict[str, tuple[float, str]] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)
    sequences: dict[str, Any] = field(default_factory=dict)
    pool: Any = None
    num_steps: int = 0
    busy_s: float = 0.0
    num_context_tokens: list[int] = field(default_factory=list)


class Bench:
    """One engine, fed with ops."""

    def __init__(self, loop: VirtualLoop, *, leaps: bool, windows: WindowPageSize | None) -> None:
        self.loop = loop
        self.answers: dict[RequestId, KnownAnswer] = {}
        self.log = TokenLog()
        executor: Any = SimExecutor(
            shape=sim_shape(block_size=BLOCK, block_bytes=8 * BLOCK, windows=windows),
            num_blocks=20,
            num_window_pages=0 if windows is None else 14,
            max_model_len=64,
            answers=self.answers,
        )
        self.core = EngineCore(
            executor if leaps else StepByStep(executor),
            SchedulerLimits(block_size=BLOCK, max_step_tokens=16, max_running=5, max_waiting=8),
            VirtualClock(loop),
        )
        self.engine = SimEngine(self.core, self._on_report, loop=loop, times=TIMES, log=self.log)
        self.outcome = Outcome()
        self.groups: list[tuple[str, Group]] = []
        self.cancelled: set[str] = set()
        self.stored: set[bytes] = set()

    def _on_report(self, report: StepReport) -> None:
        self.stored.difference_update(report.kv_events.removed)
        self.stored.update(report.kv_events.stored)

    def sink(self, name: str) -> Any:
        def take(event: EngineEvent) -> None:
            now_s = self.loop.time()
            if not isinstance(event, Tokens):
                self.outcome.others.append((now_s, name, repr(event)))
                return
            seen = self.outcome.tokens.setdefault(name, [])
            for output in event.tokens:
                seen.append((output.token_index, output.token_id))
                if output.finish_reason is not None:
                    self.outcome.ends[name] = (now_s, output.finish_reason.value)
            for run in event.runs:
                seen.extend(enumerate(run.token_ids, start=run.first_token_index))
                if run.finish_reason is not None:
                    self.outcome.ends[name] = (now_s, run.finish_reason.value)

        return take

    async def run(self, ops: Sequence[Op], *, stop_after: int) -> Outcome:
        self.engine.start()
        for number, op in enumerate(ops):
            await asyncio.sleep(op.wait / 64 + OFF_GRID_S)
            self._ask(number, op)
        await asyncio.sleep(stop_after / 64 + OFF_GRID_S)
        self.outcome.num_context_tokens.append(self.engine.load().num_context_tokens)
        self.engine.stop()
        return self._look()

    def _ask(self, number: int, op: Op) -> None:
        if op.kind == "cancel":
            if self.groups:
                name, group = self.groups[op.which % len(self.groups)]
                self.cancelled.add(name)
                self.engine.post(lambda core: core.cancel(group))
            return
        name = f"r{number}"
        prompt = array("I", [op.which % 2] * op.num_prompt)
        request = EngineRequest(
            request_id=RequestId(name),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=op.max_tokens, detokenize=False),
            hash_root=ROOT,
            block_hashes=hash_blocks(prompt, root=ROOT, block_size=BLOCK),
        )
        self.answers[request.request_id] = KnownAnswer(op.num_output, array("I", range(100, 100 + op.num_output)))
        self.engine.post(lambda core: self._enter(core, name, request, is_reserved=op.kind == "reserve"))

    def _enter(self, core: EngineCore, name: str, request: EngineRequest, *, is_reserved: bool) -> None:
        try:
            group = (core.reserve if is_reserved else core.add)(request, self.sink(name))
        except KvrelayError as error:
            self.outcome.others.append((0.0, name, str(error)))
            return
        if not isinstance(group, Group):
            return
        self.groups.append((name, group))
        if is_reserved:
            core.commit(group, len(request.prompt_token_ids))
            answer = self.answers[request.request_id]
            self.log.note(request.request_id, 0, (self.loop.time(),))
            core.start(group, [(answer.token(0), min(request.sampling.max_tokens, answer.num_tokens) == 1)])

    def _look(self) -> Outcome:
        outcome, core = self.outcome, self.core
        for name, group in self.groups:
            if name in self.cancelled:  # its tokens are not read any more, so they are not brought up to date
                continue
            outcome.times[name] = list(self.log.take(RequestId(name)))
            outcome.sequences[name] = [
                (s.state, list(s.token_ids), s.num_computed, s.num_ready, s.num_published, list(s.block_table),
                 s.retired_blocks, s.block_hashes)
                for s in group.sequences
            ]  # fmt: skip
        pool = core.pool
        outcome.pool = (
            sorted(pool.snapshot().stored),
            pool.num_free,
            pool.num_cached_blocks,
            [pool.ref_count(i) for i in range(pool.num_blocks)],
            core.scheduler.num_preemptions,
            (core.load().num_promised_window_pages, pool.windows.num_needed if pool.windows else 0),
            sorted(pool.snapshot().paged),
            sorted(self.stored) == sorted(pool.snapshot().stored),
        )
        outcome.num_steps, outcome.busy_s = self.engine.num_steps, self.engine.busy_s
        for name in self.cancelled:
            outcome.tokens.pop(name, None)
        return outcome


WINDOWS = (None, WindowPageSize(num_tokens=9, page_bytes=16 * BLOCK), WindowPageSize(num_tokens=1, page_bytes=64))


def run_bench(ops: Sequence[Op], *, leaps: bool, stop_after: int, windows: WindowPageSize | None) -> Outcome:
    outcome = Outcome()

    @on_virtual_loop
    async def main() -> None:
        nonlocal outcome
        outcome = await Bench(current_loop(), leaps=leaps, windows=windows).run(ops, stop_after=stop_after)

    main()
    return outcome


def assert_same(ops: Sequence[Op], stop_after: int, windows: WindowPageSize | None) -> None:
    leaping = run_bench(ops, leaps=True, stop_after=stop_after, windows=windows)
    stepping = run_bench(ops, leaps=False, stop_after=stop_after, windows=windows)
    for name in ("others", "ends", "tokens", "sequences", "pool", "times", "num_context_tokens"):
        assert getattr(leaping, name) == getattr(stepping, name), name
    for name, tokens in leaping.tokens.items():
        assert [index for index, _token in tokens] == list(range(tokens[0][0], tokens[0][0] + len(tokens))), name


OPS = st.builds(
    Op,
    wait=st.integers(0, 40),
    kind=st.sampled_from(["add", "reserve", "reserve", "cancel"]),
    num_prompt=st.integers(1, 20),
    num_output=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    which=st.integers(0, 7),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPS, max_size=14), st.integers(0, 400), st.sampled_from(WINDOWS))
def test_leap_leaves_the_same_state_events_and_times_as_single_steps(
    ops: list[Op], stop_after: int, windows: WindowPageSize | None
) -> None:
    assert_same(ops, stop_after, windows)


def random_ops(seed: int) -> Iterator[Op]:
    draw = random.Random(seed)
    for _ in range(60):
        yield Op(
            wait=draw.randrange(30),
            kind=draw.choice(["add", "reserve", "reserve", "reserve", "cancel"]),
            num_prompt=draw.randrange(1, 20),
            num_output=draw.randrange(1, 40),
            max_tokens=draw.randrange(1, 40),
            which=draw.randrange(8),
        )


@pytest.mark.parametrize("seed", range(20))
def test_leap_over_a_long_run_leaves_the_same_as_single_steps(seed: int) -> None:
    assert_same(list(random_ops(seed)), random.Random(seed).randrange(200), WINDOWS[seed % len(WINDOWS)])


@on_virtual_loop
async def test_leap_takes_a_long_answer_in_few_turns_of_the_loop() -> None:
    turns: list[float] = []
    bench = Bench(current_loop(), leaps=True, windows=None)
    bench._on_report = lambda report: turns.append(current_loop().time())  # type: ignore[method-assign] # noqa: SLF001
    await bench.run([Op(wait=0, kind="add", num_prompt=9, num_output=40, max_tokens=40, which=0)], stop_after=400)
    assert bench.outcome.ends["r0"][1] == "stop"
    assert bench.engine.num_steps == 40
    assert len(turns) < 20
