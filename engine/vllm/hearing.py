"""Turns the reports of vLLM's processes into events, and notes what they free.

Reports come by pipes, and tokens by vLLM's own way (`engine.py`). So the scheduler's pipe is read before anything that
follows from its steps.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import EngineFault
from engine.events import PrefillProgress
from engine.sequence import SequenceState
from engine.vllm.admission import Admission
from engine.vllm.errands import Closed, Report, Staged, StepBegun, StepEnded
from engine.vllm.exports import Export
from engine.vllm.observed import Observed
from engine.vllm.outbox import Outbox
from engine.vllm.running import Pipes
from engine.vllm.work import Run, Work

_SCHEDULER = 0
"""Pipe of the scheduler's reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """See the module. Event loop only."""

    pipes: Pipes
    num_ranks: int
    runs: Mapping[int, Run | Export]
    """Samples and exports inside vLLM, by key."""
    leave: Callable[[int], None]
    """Called with the key of a sample that no rank touches any more."""
    admission: Admission
    observed: Observed
    outbox: Outbox

    def open(self) -> None:
        """Begin to read."""
        for idx, fd in enumerate(self.pipes.reading):
            asyncio.get_running_loop().add_reader(fd, self._read, idx)

    def close(self) -> None:
        """Read no more."""
        for fd in self.pipes.reading:
            asyncio.get_running_loop().remove_reader(fd)

    def catch_up(self) -> None:
        """Hear what vLLM's scheduler has said."""
        self._read(_SCHEDULER)

    def emit_held(self, work: Work) -> None:
        """Emit the first tokens of a prompt for a puller, once all of them and all its KV are there."""
        group = work.group
        is_whole = work.num_staged(self.num_ranks) == group.leader.num_tokens
        if is_whole and len(work.first) == len(group.sequences) and not group.is_over:
            for sequence in group.sequences:
                sequence.enter(SequenceState.HELD)
            outputs = [work.first[each.sample_index] for each in group.sequences]
            self.outbox.emit(group, group.tokens_event(outputs, self.observed.clock.monotonic()))

    def _read(self, idx: int) -> None:
        try:
            for report in self.pipes.take(idx):
                self._hear(report)
        except EOFError:
            self._break(EngineFault("a process of vLLM has ended"))
        except Exception as error:  # noqa: BLE001 - the books cannot be trusted from here on
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.close()
        self.outbox.fail("vLLM is heard no more", error)

    def _hear(self, report: Report) -> None:
        match report:
            case StepBegun():
                self._begun(report)
            case StepEnded():
                self.outbox.flush(samples=self.observed.ended(report))
            case Staged():
                self._staged(report)
            case Closed():
                self._closed(report)

    def _begun(self, step: StepBegun) -> None:
        events = self.observed.begun(step)
        for key in step.preempted:
            self._run(key).is_preempted = True
        for key, num_cached in step.started:
            run = self._run(key)
            run.has_begun, run.is_preempted = True, False
            run.sequence.num_computed = num_cached
            if not run.work.group.reported_prefill and run.sequence is run.work.group.leader:
                self._started(run, num_cached)
        for key, num_computed in step.computed:
            self._run(key).sequence.num_computed = num_computed
        for work in self.admission.outgrown(step.num_free_pages):
            self.observed.num_preemptions += not work.is_preempted
            work.preempt()
        self.outbox.flush(events=events)

    def _run(self, key: int) -> Run:
        run = self.runs[key]
        assert isinstance(run, Run), "exports are not scheduled"
        return run

    def _started(self, run: Run, num_cached: int) -> None:
        sequence = run.sequence
        sequence.num_cached_tokens = num_cached
        num_found = sequence.num_found(num_cached // sequence.block_size)
        self.observed.mirror.mark_reused(sequence.request.block_hashes[:num_found])
        self.observed.num_cached_tokens += num_cached
        started = run.work.group.admitted(run.sequence, self.observed.clock.monotonic())
        if started is not None:
            self.outbox.emit(run.work.group, started)

    def _staged(self, staged: Staged) -> None:
        run = self.runs[staged.key]
        if isinstance(run, Export):
            run.hear(staged, num_ranks=self.num_ranks)
            return
        work = run.work
        if (staged.rank, staged.key) in work.loading:
            work.loading.remove((staged.rank, staged.key))
            if not work.loading and not work.group.holds_after_prefill:
                self.admission.take_slots_back(work)
            return
        before = work.num_staged(self.num_ranks)
        work.staged[staged.rank] = staged.num_tokens
        num_tokens = work.num_staged(self.num_ranks)
        if num_tokens > before and not work.group.is_over:
            progress = PrefillProgress(num_computed_tokens=num_tokens, block_table=work.slots)
            self.outbox.emit(work.group, progress)
            self.emit_held(work)

    def _closed(self, closed: Closed) -> None:
        """Note what vLLM has confirmed to be over."""
        self.catch_up()
        for key in closed.keys:
            self.runs[key].open_ranks.discard(closed.rank)
            if not self.runs[key].open_ranks:
                self.leave(key)
