"""vLLM's AsyncLLM as the engine of a worker: requests in, events out, like `engine.core.EngineCore`.

vLLM schedules and computes steps in processes of its own. This side lets requests in (`admission.py`), and turns vLLM's
outputs, and the connector's reports (`hearing.py`), into events.

a prompt for a puller   enters with slots; the connector stores its KV there; vLLM's pages are free when it is computed
a reservation           has pages and slots that the pull fills; when they are verified it enters vLLM
                        with the prefill's first token behind the prompt, and the connector loads its pages
a prefix for a puller   is copied out of vLLM's cache within a step, by a request that is never scheduled
a request with a pull   enters with the slots of its prefix, which the connector loads
any other request       enters as it is

Everything runs on the event loop; commands take effect at once.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from typing import Any

from common.block_hash import NO_HASHES, BlockHashes
from common.clock import Clock
from common.errors import EngineFault, Refused
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents
from common.prefix_chains import PrefixChain
from common.return_curve import ReturnCurve
from common.timing import TimingModel
from engine.events import EngineLoad, Failed, StepReport, TokenOutput
from engine.pages.hot_prefixes import hot_prefixes
from engine.published import ForgottenPages
from engine.request import EngineRequest
from engine.sequence import Sequence, SequenceState
from engine.steps.group import Group, Sink
from engine.steps.landing import Landing
from engine.steps.scheduler import SchedulerLimits
from engine.thread import RunningStep
from engine.vllm.admission import Admission
from engine.vllm.cache_mirror import CacheMirror
from engine.vllm.client import NotEntered, SampleOutput, SampleSpec
from engine.vllm.exports import Export, Exporter
from engine.vllm.hearing import Hearing
from engine.vllm.load import measure_load
from engine.vllm.observed import Observed
from engine.vllm.outbox import Outbox
from engine.vllm.outputs import token_output
from engine.vllm.prefixes import PrefixSlots
from engine.vllm.running import RunningVllm
from engine.vllm.work import Run, Work

logger = logging.getLogger(__name__)


class VllmEngine:
    """See the module; an `engine.interface.Engine`."""

    def __init__(self, vllm: RunningVllm, limits: SchedulerLimits, clock: Clock) -> None:
        self._vllm = vllm
        self._clock = clock
        self._block_size = limits.block_size
        self._num_places = limits.max_running
        self._admission = Admission(vllm.kv, vllm.num_blocks, limits.max_running, limits.max_waiting)
        self._observed = Observed(clock, CacheMirror(block_size=limits.block_size))
        self._works: dict[Group, Work] = {}
        self._runs: dict[int, Run | Export] = {}
        """By key, until all ranks have confirmed the end."""
        self._keys = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_arrived = 0
        self.landings = PrefixSlots(
            kv=vllm.kv,
            mirror=self._observed.mirror,
            entered=self._works.values(),
            export=Exporter(vllm=vllm, runs=self._runs, keys=self._keys, spawn=self._spawn).export,
            add=self.add,
            num_empty=lambda: self.load().num_cold_blocks,
        )
        self._outbox = Outbox(self.load)
        self._hearing = Hearing(
            pipes=vllm.pipes,
            num_ranks=vllm.num_ranks,
            runs=self._runs,
            leave=self._leave,
            admission=self._admission,
            observed=self._observed,
            outbox=self._outbox,
        )

    @property
    def running_step(self) -> RunningStep | None:
        """See `EngineDriver`."""
        return self._observed.running_step

    def open(self, on_report: Callable[[StepReport], None], on_fault: Callable[[Exception], None]) -> None:
        """Begin to read the reports of vLLM's processes."""
        self._outbox.on_report, self._outbox.on_fault = on_report, on_fault
        self._hearing.open()

    async def aclose(self) -> None:
        """End vLLM's processes."""
        self._hearing.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._vllm.client.shutdown)
        self._vllm.pipes.close()

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, hashes: BlockHashes) -> Landing:
        """See `Engine`."""
        self._num_arrived += 1
        return Landing(order=self._num_arrived - 1, queued_s=self._clock.monotonic(), hashes=hashes)

    def add(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """See `Engine`."""
        return self._queue(self._work(request, sink, landing))

    def add_prefill_only(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """See `Engine`; the pages that stay are slots."""
        work = self._work(request, sink, landing)
        work.group.holds_after_prefill = True
        return self._queue(work)

    def reserve(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """See `Engine`."""
        work = self._work(request, sink, None)
        if (refused := self._admission.reserve(work)) is not None:
            return refused
        self._accept(work)
        work.group.leader.enter(SequenceState.RESERVED)
        return work.group

    def commit(self, group: Group, num_tokens: int) -> None:
        """See `Engine`."""
        if group in self._works:
            self._works[group].num_loaded = num_tokens

    def start(self, group: Group, first_tokens: Seq[tuple[int, bool]]) -> None:
        """See `Engine`."""
        if group.leader.state is not SequenceState.RESERVED:
            return  # cancelled in the meantime
        group.prefilled_elsewhere(self._clock.monotonic())
        work = self._works[group]
        work.fork()
        for sequence, (token_id, is_finished) in zip(group.sequences, first_tokens, strict=True):
            sequence.append_token(token_id)
            if is_finished:
                sequence.enter(SequenceState.FINISHED)
        self._enter(work)

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """See `Engine`."""
        self._end(group, [each for each in group.sequences if each.sample_index == sample_index])

    def cancel(self, group: Group) -> None:
        """See `Engine`. Slots and pages are free when vLLM has confirmed the end."""
        self._end(group, group.sequences)

    # ── what workers ask ────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> KvEvents:
        """See `Engine`."""
        return self._observed.mirror.snapshot()

    def hot_prefixes(self, max_blocks: int) -> list[PrefixChain]:
        """See `Engine`."""
        return hot_prefixes(self._observed.mirror, (), max_blocks)

    def report_published(self) -> None:
        """See `Engine`: vLLM's pages have no lives."""

    def forget(self, root: HashRoot) -> ForgottenPages:
        """See `Engine`: vLLM's cache is emptied as a whole or not at all."""
        obstacle = "vLLM's engine keeps cached blocks until it needs their pages: restart this worker"
        return ForgottenPages(num_blocks=0, obstacle=obstacle if self._observed.mirror.has_root(root) else "")

    def expect_return(self, ends: Seq[BlockHash], curve: ReturnCurve) -> None:
        """Do nothing: vLLM evicts by an order of its own."""

    def change_limits(self, limits: SchedulerLimits) -> None:
        """See `Engine`; the most tokens and places of a step are vLLM's, for good."""
        self._admission.max_running = min(limits.max_running, self._num_places)
        self._admission.max_waiting = limits.max_waiting

    def take_timing(self, timing: TimingModel) -> None:
        """Do nothing: vLLM's scheduler does not predict."""

    def load(self) -> EngineLoad:
        """See `Engine`."""
        return measure_load(self._works.values(), self._admission, self._observed)

    # ── entering ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, request: EngineRequest, sink: Sink, landing: Landing | None) -> Work:
        """Return a request that holds nothing yet. Raises InvalidRequest, PromptTooLong."""
        landing = landing or self.arrive(NO_HASHES)
        work = Work.of(request, sink, landing, block_size=self._block_size, max_model_len=self._vllm.max_model_len)
        self._admission.check_fits(work)
        return work

    def _queue(self, work: Work) -> Group | Refused:
        if (refused := self._admission.line_up(work)) is not None:
            return refused
        self.landings.enter(work)
        self._accept(work)
        self._let_in()
        return work.group

    def _accept(self, work: Work) -> None:
        self._works[work.group] = work
        self._outbox.accept(work.group.request.request_id)

    def _let_in(self) -> None:
        """Pass requests on to vLLM while there is room."""
        for work in self._admission.let_in():
            work.fork()
            self._enter(work)

    def _enter(self, work: Work) -> None:
        """Pass the samples of a request to vLLM."""
        for sequence in work.group.sequences:
            if sequence.state in (SequenceState.WAITING, SequenceState.RESERVED):
                sequence.enter(SequenceState.RUNNING)
                sequence.num_computed = work.num_loaded
                self._run(work, sequence, next(self._keys))
        self._forget_ended(work)
        self._outbox.flush_soon()

    def _run(self, work: Work, sequence: Sequence, key: int) -> None:
        ranks = set(range(self._vllm.num_ranks))
        if work.num_loaded:
            work.loading |= {(rank, key) for rank in ranks}
        work.runs[key] = self._runs[key] = run = Run(work, sequence, ranks)
        self._spawn(self._follow(run, run.spec(key, self._vllm)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, group: Group, sequences: Seq[Sequence]) -> None:
        """End samples in any state."""
        work = self._works.get(group)
        if work is None:
            return
        for sequence in sequences:
            if sequence.state is not SequenceState.FINISHED:
                sequence.enter(SequenceState.FINISHED)
        for run in work.runs.values():
            is_over = run.sequence.state is SequenceState.FINISHED
            if is_over:
                run.end()
        self._forget_ended(work)

    def _leave(self, key: int) -> None:
        """Note that vLLM does not have a sample any more."""
        run = self._runs.pop(key)
        if isinstance(run, Export):
            run.leave()
            return
        work = run.work
        del work.runs[key]
        if not work.runs and work.group.holds_after_prefill:  # vLLM has its pages back; the slots stay
            self._admission.take_pages_back(work)
        if not work.runs and work.is_waiting:
            self._admission.line_up_again(work)
        self._let_in()
        self._forget_ended(work)

    def _forget_ended(self, work: Work) -> None:
        """Free everything of a request that is over, here and in vLLM, of which either may be first."""
        if work.runs or not work.group.is_over:
            return
        self._works.pop(work.group, None)
        self._admission.take_pages_back(work)
        self._admission.take_slots_back(work)
        self._let_in()
        self._outbox.flush_soon()

    # ── what vLLM says ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, run: Run, spec: SampleSpec) -> None:
        """Pass a sample to vLLM and turn its outputs into events."""
        if run.sequence.state is SequenceState.FINISHED:  # in the turn of the loop in which it was let in
            self._leave(spec.errand.key)
            return
        run.task = asyncio.current_task()
        try:
            async for output in self._vllm.client.generate(spec):
                if run.sequence.state is SequenceState.RUNNING:
                    self._take(run.work, run.sequence, output)
        except Exception as error:  # noqa: BLE001 - the top of a task
            if self._vllm.client.is_broken:
                self._outbox.fail("vLLM is over", error)
                return
            self._fail(run.work, error)
            if isinstance(error, NotEntered):
                self._leave(spec.errand.key)

    def _take(self, work: Work, sequence: Sequence, output: SampleOutput) -> None:
        self._hearing.catch_up()
        group = work.group
        group.prompt_logprobs += output.prompt_logprobs
        outputs: list[TokenOutput] = []
        for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            each = token_output(sequence, token_id, logprobs, eos_token_ids=self._vllm.eos_token_ids)
            outputs.append(each)
            if group.holds_after_prefill:
                work.first[each.sample_index] = each
                self._hearing.emit_held(work)
                return
            sequence.append_token(token_id)
            if each.finish_reason is not None:
                sequence.enter(SequenceState.FINISHED)
                break
        sequence.num_computed = sequence.num_tokens - 1
        if outputs:
            self._outbox.emit(group, group.tokens_event(outputs, self._clock.monotonic()))
        if output.end and sequence.state is SequenceState.RUNNING:
            self._fail(work, EngineFault(f"vLLM has ended it: {output.end}"))
        self._forget_ended(work)

    def _fail(self, work: Work, error: Exception) -> None:
        if work.group in self._works and not work.group.is_over:
            logger.error("vLLM has failed a request", exc_info=error)
            self.cancel(work.group)
            reason = f"vLLM could not serve the request: {type(error).__name__}: {error}"
            self._outbox.emit(work.group, Failed(error=EngineFault(reason)))
