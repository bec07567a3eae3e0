"""Requests of a `VllmEngine`, from their arrival until vLLM has confirmed their end."""

import asyncio
from dataclasses import dataclass, field

from common.errors import InvalidRequest, PromptTooLong
from common.ids import BlockId
from engine.events import TokenOutput
from engine.request import EngineRequest
from engine.sequence import Sequence, SequenceState
from engine.steps.group import Group, Sink
from engine.steps.landing import Landing
from engine.vllm.cache_mirror import salt_of
from engine.vllm.client import SampleSpec
from engine.vllm.errands import Errand
from engine.vllm.running import RunningVllm


@dataclass(slots=True, eq=False)
class Run:
    """One sample of a request inside vLLM."""

    work: "Work"
    sequence: Sequence
    open_ranks: set[int]
    """Ranks that may still touch its slots."""
    task: "asyncio.Task[None] | None" = None
    """Task that follows it, once that has begun; what begins is also ended in vLLM."""
    has_begun: bool = False
    """Whether vLLM has given it pages."""
    is_preempted: bool = False
    """Whether vLLM has taken them back until there are enough again."""

    def end(self) -> None:
        """End it in vLLM."""
        if self.task is not None and not self.task.cancelling():  # twice would cancel the end in vLLM
            self.task.cancel()

    def spec(self, key: int, vllm: RunningVllm) -> SampleSpec:
        """Return what vLLM is told of it."""
        work, sequence = self.work, self.sequence
        request, leader = work.group.request, work.group.leader
        stores = work.group.holds_after_prefill and sequence is leader
        ends = frozenset() if request.sampling.ignore_eos else vllm.eos_token_ids
        return SampleSpec(
            errand=Errand(
                key=key,
                region_path=vllm.kv.region_path,
                slots=work.slots if stores or work.num_loaded else (),
                num_loaded=work.num_loaded,
                num_presumed=work.landing.num_cached_blocks * leader.block_size,
                stores=stores,
            ),
            token_ids=sequence.token_ids[:],
            num_prompt_tokens=sequence.num_prompt_tokens,
            sample_index=sequence.sample_index,
            salt=salt_of(request.hash_root),
            sampling=request.sampling,
            stop_token_ids=request.sampling.stop_token_ids | ends,
            max_new_tokens=1 if work.group.holds_after_prefill else sequence.max_num_tokens - sequence.num_tokens,
            wants_prompt_logprobs=sequence.num_output_tokens == 0 and sequence is leader,
        )


@dataclass(slots=True, eq=False)
class Work:
    """One request."""

    group: Group
    landing: Landing
    """Place in line, and what was pulled for it."""
    slots: tuple[BlockId, ...] = ()
    """Staged blocks of its prompt."""
    num_loaded: int = 0
    """Leading tokens whose KV a pull has brought into the slots, or vLLM is presumed to have cached."""
    loading: set[tuple[int, int]] = field(default_factory=set)
    """(rank, key) of each copy out of the slots that is still to come."""
    staged: dict[int, int] = field(default_factory=dict)
    """Leading tokens whose KV a rank has put into the slots, by rank."""
    runs: dict[int, Run] = field(default_factory=dict)
    """Its samples inside vLLM, by key."""
    first: dict[int, TokenOutput] = field(default_factory=dict)
    """First tokens of a prompt for a puller, by sample."""

    @classmethod
    def of(cls, request: EngineRequest, sink: Sink, landing: Landing, *, block_size: int, max_model_len: int) -> "Work":
        """Return a request that holds nothing yet. Raises InvalidRequest, PromptTooLong."""
        if request.sampling.has_beams:
            raise InvalidRequest("model.engine: vllm has no beam search", field="use_beam_search")
        if request.pooling is not None:
            raise InvalidRequest("model.engine: vllm computes no embeddings", field="sequence.pooling")
        leader = Sequence.from_request(request, block_size=block_size, order=landing.order)
        leader.max_num_tokens = min(leader.max_num_tokens, max_model_len)
        if leader.num_tokens >= max_model_len:
            message = f"prompt has {leader.num_tokens} tokens; this model takes {max_model_len - 1}"
            raise PromptTooLong(message, field="prompt")
        group = Group(request, sink, landing.queued_s)
        group.sequences.append(leader)
        return cls(group, landing)

    def take_pulled(self, slots: tuple[BlockId, ...]) -> None:
        """Take the staged blocks of a prefix that was pulled for it."""
        leader = self.group.leader
        self.slots, self.num_loaded = slots, len(slots) * leader.block_size
        leader.pulled_blocks = self.landing.pulled

    def drop_pulled(self) -> tuple[BlockId, ...]:
        """Return the staged blocks of its prefix, which it computes instead: it has not entered vLLM."""
        slots, self.slots, self.num_loaded = self.slots, (), 0
        self.group.leader.pulled_blocks = range(0)
        return slots

    @property
    def is_bringing(self) -> bool:
        """Whether blocks that were pulled for it will be in vLLM's cache when it starts."""
        return self.num_loaded > 0 and self.group.prefill_started_s is None and not self.group.is_over

    def fork(self) -> None:
        """Add the samples that are missing, which share the prompt in vLLM's cache."""
        leader, sequences = self.group.leader, self.group.sequences
        missing = range(len(sequences), self.group.request.sampling.n)
        sequences += [leader.fork(leader.sample_index + i) for i in missing]

    def preempt(self) -> None:
        """End its samples in vLLM; it lines up again when vLLM has confirmed that."""
        for run in self.runs.values():
            if run.sequence.state is SequenceState.RUNNING:
                run.sequence.enter(SequenceState.WAITING)
                run.end()

    @property
    def num_sequences(self) -> int:
        """Places of a step that it may take: those of its samples that are not over."""
        return len(self._samples)

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks of all tokens that it begins with."""
        leader = self.group.leader
        return -(-leader.num_tokens // leader.block_size)

    @property
    def num_blocks(self) -> int:
        """Pages of these samples and of their next tokens; they share the blocks before the prompt's last token."""
        leader = self.group.leader
        num_shared = (leader.num_prompt_tokens - 1) // leader.block_size
        return num_shared + sum(each.num_tokens // each.block_size + 1 - num_shared for each in self._samples)

    @property
    def num_awaited_blocks(self) -> int:
        """Those of its pages that vLLM has not given it yet: it gives a prompt's chunk by chunk."""
        if self.has_begun and all(run.sequence.num_to_run <= 1 for run in self.runs.values()):
            return 0
        given = [run.sequence.num_computed for run in self.runs.values() if run.has_begun]
        return self.num_blocks - max(given, default=0) // self.group.leader.block_size

    @property
    def has_begun(self) -> bool:
        """Whether vLLM has given each of its samples pages."""
        return bool(self.runs) and all(run.has_begun for run in self.runs.values())

    @property
    def is_preempted(self) -> bool:
        """Whether a sample of it waits in vLLM for the pages that it has lost."""
        return any(run.is_preempted for run in self.runs.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a sample of it is to enter vLLM, for the first time or again."""
        return any(sequence.state is SequenceState.WAITING for sequence in self.group.sequences)

    @property
    def is_leaving(self) -> bool:
        """Whether vLLM has only to confirm that its samples are over."""
        states = [run.sequence.state for run in self.runs.values()]
        return bool(states) and SequenceState.RUNNING not in states

    @property
    def _samples(self) -> list[Sequence]:
        """Its samples inside vLLM, else those that are to enter."""
        if self.runs:
            return [run.sequence for run in self.runs.values()]
        sequences = self.group.sequences
        missing = [self.group.leader] * (self.group.request.sampling.n - len(sequences))
        return [each for each in sequences if each.state is not SequenceState.FINISHED] + missing

    def num_staged(self, num_ranks: int) -> int:
        """Return the leading tokens whose KV all ranks have put into the slots."""
        return min(self.staged.values()) if len(self.staged) == num_ranks else 0
