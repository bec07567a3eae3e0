"""Drafts from a small model with the target's vocabulary (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

The draft model has an executor and pages of its own in the process that decodes. Its KV is named by its own fingerprint
and never leaves it: what is drafted decides no token, so that a worker that takes over an answer computes it anew. For
each sequence it keeps a *shadow*, which holds the known tokens and the drafted ones behind them; where the target has
chosen otherwise, the shadow goes back. A prompt enters in pieces, once its answer has begun: of all prompts at most
`MAX_CATCH_UP` tokens a step.

The draft model draws with the sampling parameters and the noise of the target (engine/sampling/noise.py): both then
choose the same token as often as their distributions allow (coupling without communication). Under the rejection rule,
whose draft must not depend on the noise of the verification, it draws with other noise.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from common.block_hash import NO_HASHES
from common.process import CannotStart
from common.timing import StepShape
from common.tokens import TokenArray, as_tokens
from engine.executor import Sampled, ScheduledSequence, StepHandle, StepResult
from engine.kv_store import KvStore
from engine.pages.block_pool import BlockPool
from engine.request import EngineRequest
from engine.sequence import Sequence
from engine.speculation.costs import StepCosts
from engine.speculation.drafter import common_len
from engine.speculation.rates import TreeRates

MAX_CATCH_UP = 512
"""Most tokens that the draft model reads in a step, which every answer waits for. Nothing is drafted for a sequence
until all of it is read."""
TRIAL_STEPS = 512
"""Steps without a draft after which one token is drafted to see whether it pays now."""
_PRIOR_RATES = (0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
_PRIOR_BRANCH_RATES = (0.15, 0.08, 0.05, 0.03)
_OTHER_NOISE = 0x9E3779B97F4A7C15


class DifferentVocabulary(CannotStart):
    """The draft model cannot draft for this model."""

    key = "model.speculation.model"


class Vocabulary(Protocol):
    """A model, as far as its tokens are concerned."""

    vocab_size: int
    model_name: str


class DraftingExecutor(Vocabulary, Protocol):
    """The part of an `Executor` that drafts."""

    kv: KvStore
    max_model_len: int

    def launch(self, batch: Seq[ScheduledSequence]) -> StepHandle:
        """See `Executor`."""
        ...


@dataclass(slots=True, eq=False)
class Shadow(Sequence):
    """A sequence as its drafter knows it: with the drafted tokens, and pages of the drafter."""

    first: int = 0
    """First token whose KV it has or will have; its block table begins there."""


class ModelDrafter:
    """A `Drafter` by a draft model."""

    def __init__(
        self, executor: DraftingExecutor, *, target: Vocabulary, is_coupled: bool, num_branches: int = 0
    ) -> None:
        """`is_coupled`: drafts share the target's noise. `num_branches`: most tokens beside its first choice.

        Raises DifferentVocabulary.
        """
        if executor.vocab_size != target.vocab_size:
            raise DifferentVocabulary(
                f"cannot draft with {executor.model_name}: it has {executor.vocab_size} tokens, and"
                f" {target.model_name} has {target.vocab_size}; choose a draft model with the same vocabulary"
            )
        self._executor = executor
        self._is_coupled = is_coupled
        self._num_branches = num_branches
        self._pool = BlockPool(executor.kv.num_blocks)
        self._shadows: dict[Sequence, Shadow] = {}
        self._rates = TreeRates(_PRIOR_RATES, _PRIOR_BRANCH_RATES, num_branches=num_branches, trial_steps=TRIAL_STEPS)
        self._costs = StepCosts()

    @property
    def num_used_blocks(self) -> int:
        """Pages that its shadows hold."""
        return self._pool.num_used

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[list[float]]:
        """See `Drafter`."""
        max_tokens = min(max_tokens, self._executor.max_model_len - sequence.num_tokens - 1)
        return self._rates.prospects(sequence, max_tokens) if max_tokens > 0 else []

    def costs_s(self, num_sequences: int, num_tokens: int) -> list[float] | None:
        """See `Drafter`. Each token is a step of the draft model; nothing is known before the first ones."""
        self._rates.count_step()
        step_s = self._costs.predict(num_sequences, 0)
        return [step_s[0] * depth for depth in range(num_tokens + 1)] if step_s else None

    def draft(self, wanted: Mapping[Sequence, Seq[int]]) -> dict[Sequence, list[TokenArray]]:
        """See `Drafter`. A sequence of which not all tokens are read yet gets no draft; some of them are read now."""
        shadows = {sequence: self._shadow(sequence) for sequence in wanted}
        active = list(wanted)
        others: dict[Sequence, list[int]] = {}
        depth = 0
        while active:
            depth += 1
            began_s = time.perf_counter()
            drawn = self._step([shadows[sequence] for sequence in active])
            if depth > 1:  # the first step may read a prompt
                self._costs.observe(StepShape(num_decodes=len(active)), time.perf_counter() - began_s)
            else:
                others = {each: _others(drawn[shadows[each]]) for each in active if shadows[each] in drawn}
            active = [each for each in active if shadows[each] in drawn and wanted[each][0] > depth]
        for sequence, token_ids in others.items():
            self._rates.drafted(sequence, token_ids)
        return {
            each: [
                shadows[each].token_ids[each.num_tokens :],
                *(as_tokens([token_id]) for token_id, _ in zip(others.get(each, ()), wanted[each][1:], strict=False)),
            ]
            for each in wanted
        }

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """See `Drafter`."""
        self._rates.observe(item, result)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._rates.forget(sequence)
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None:
            self._release(shadow)

    def _new_shadow(self, sequence: Sequence) -> Shadow:
        shadow = Shadow.from_request(
            self._request(sequence.request), block_size=self._executor.kv.shape.block_size, order=sequence.order
        )
        assert isinstance(shadow, Shadow)
        return shadow

    def _shadow(self, sequence: Sequence) -> Shadow:
        """Return a sequence's shadow with exactly its known tokens, of which the last one at least is not computed."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            shadow = self._shadows[sequence] = self._new_shadow(sequence)
            shadow.sample_index = sequence.sample_index
        known, drafted = sequence.token_ids, shadow.token_ids
        same = common_len(known, drafted, begin=shadow.num_ready)
        if same < len(drafted) and shadow.request.sampling.has_penalties:
            # The sampler adds up the tokens of an owner, and takes none back (engine/sampling/penalties.py).
            shadow = self._shadows[sequence] = replace(shadow)
        del drafted[same:]
        drafted += known[same:]
        shadow.num_computed = min(shadow.num_computed, same, len(known) - 1)
        shadow.num_ready = shadow.num_computed  # tokens that the target has accepted, and that are computed
        return shadow

    def _request(self, request: EngineRequest) -> EngineRequest:
        """Return the request of a shadow: its choices are cut to the grammar later, and the rest is never used.

        The likeliest tokens come with their log-probabilities where they become branches.
        """
        num_logprobs = 1 + self._num_branches if self._num_branches else None
        sampling = replace(
            request.sampling, n=1, num_logprobs=num_logprobs, num_prompt_logprobs=None, structured_outputs=""
        )
        if not self._is_coupled:
            sampling = replace(sampling, seed=sampling.seed ^ _OTHER_NOISE)
        return replace(request, sampling=sampling, grammar=None, block_hashes=NO_HASHES)

    def _step(self, shadows: Seq[Shadow]) -> dict[Shadow, Sampled]:
        """Compute what is known of each shadow, as far as pages go; returns the tokens of those that have got one."""
        read: list[Shadow] = []
        batch: list[ScheduledSequence] = []
        num_to_read = MAX_CATCH_UP
        for shadow in shadows:
            num_left = shadow.num_tokens - shadow.num_computed
            num_new = min(num_left, max(1, num_to_read))
            if self._make_room(shadow, shadow.num_computed + num_new):
                num_to_read -= num_new - 1
                read.append(shadow)
                batch.append(ScheduledSequence(shadow, num_new, int(num_new == num_left)))
        drawn: dict[Shadow, Sampled] = {}
        if not batch:
            return drawn
        results = self._executor.launch(batch).results()
        for shadow, item, result in zip(read, batch, results, strict=True):
            shadow.num_computed += item.num_new_tokens
            self._took(shadow, result)
            for sampled in result.sampled:
                shadow.token_ids.append(sampled.token_id)
                drawn[shadow] = sampled
        return drawn

    def _took(self, shadow: Shadow, result: StepResult) -> None:
        """Take a step's further results for a shadow, before its tokens are appended."""

    def _make_room(self, shadow: Shadow, num_tokens: int) -> bool:
        """Give a shadow pages for its first `num_tokens` tokens; one that gets none loses those that it has."""
        num_missing = -(-(num_tokens - shadow.first) // shadow.block_size) - len(shadow.block_table)
        if num_missing > self._pool.num_free:
            self._release(shadow)
            return False
        if num_missing > 0:
            shadow.block_table.extend(self._pool.allocate(num_missing))
        return True

    def _release(self, shadow: Shadow) -> None:
        self._pool.release(list(shadow.block_table))
        del shadow.block_table[:]
        shadow.num_computed = shadow.num_ready = 0


def _others(sampled: Sampled) -> list[int]:
    """Return the likeliest tokens beside the one that was drawn."""
    top = () if sampled.logprobs is None else sampled.logprobs.top
    return [token_id for token_id, _logprob in top if token_id != sampled.token_id]
