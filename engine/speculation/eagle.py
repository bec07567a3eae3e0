"""Drafts from a draft layer: EAGLE and EAGLE-3 (`engine/model/eagle.py`).

The layer reads a token together with the model's state at the token before it. States are not part of KV, and are not
handed over; so the layer knows a sequence from the first token behind a state that this worker has computed: from the
beginning of a prompt that was computed here in one step, else from its last chunk, from the end of what a cache or
another worker brought. Its KV has pages of its own, and lies in none of the model's blocks: a prompt's would have to be
computed again in any case, and attention to the last tokens is most of what the layer has. For the same reason no more
than the last `MAX_STATES` are kept for it while it is not asked.

The layer is a small draft model: drafting, its pages, its noise and its cost are those of `ModelDrafter`. But KV of
tokens that it drafted itself, made from its own outputs, is always computed anew from the model's states.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from common.tokens import TokenArray
from engine.executor import ScheduledSequence, States, StepResult
from engine.sequence import Sequence
from engine.speculation.draft_model import DraftingExecutor, ModelDrafter, Shadow, Vocabulary

MAX_STATES = 256
"""Most tokens of a sequence whose states are kept until the layer reads them."""


@dataclass(slots=True)
class KnownStates:
    """States of the model at the latest tokens of a sequence, as far as the layer has not read them."""

    end: int = 0
    """First token that cannot be read: the state before it is not known."""
    rows: "deque[States]" = field(default_factory=lambda: deque(maxlen=MAX_STATES))
    """State before each token in [begin, end), float32 [size]."""

    @property
    def begin(self) -> int:
        """First token that can be read."""
        return self.end - len(self.rows)

    def take(self, states: States, end: int) -> None:
        """Add the states before the tokens up to `end`. Those that a step has computed again are known already."""
        num_new = end - self.end
        if num_new > len(states):  # a gap
            self.rows.clear()
            num_new = len(states)
        if num_new > 0:
            self.rows.extend(states[-num_new:])
            self.end = end

    def forget_before(self, token: int) -> None:
        """Drop the states before tokens that are read; the last one stays, since its token may be read once more."""
        while self.begin < min(token, self.end - 1):
            self.rows.popleft()


@dataclass(slots=True, eq=False)
class LayerShadow(Shadow):
    """A draft layer's record of a sequence."""

    known: KnownStates = field(default_factory=KnownStates)
    outputs: "list[States]" = field(default_factory=list)
    """Outputs of the layer at the tokens from `known.end` - 1 on, which stand for the states there."""
    num_read: int = 0
    """Leading tokens that were read with the model's states, or lie before `first`."""

    def states(self, begin: int, num_tokens: int) -> States:
        """Return the states before some tokens, float32 [num_tokens, size]: the model's, or outputs of the layer."""
        known = self.known
        if begin >= known.end:
            return np.stack(self.outputs[begin - known.end :][:num_tokens])
        return np.stack([known.rows[token - known.begin] for token in range(begin, begin + num_tokens)])


class EagleDrafter(ModelDrafter):
    """A `Drafter` by a draft layer. Steps have to return the states that it reads (`StepResult.states`)."""

    def __init__(
        self, executor: DraftingExecutor, *, target: Vocabulary, is_coupled: bool, num_branches: int = 0
    ) -> None:
        super().__init__(executor, target=target, is_coupled=is_coupled, num_branches=num_branches)
        self._known: dict[Sequence, KnownStates] = {}

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[list[float]]:
        """See `Drafter`. There are none before the state behind which the last token was chosen is known."""
        known = self._known.get(sequence)
        if known is None or known.end != sequence.num_tokens or not known.rows:
            return []
        return super().prospects(sequence, max_tokens)

    def draft(self, wanted: Mapping[Sequence, Seq[int]]) -> dict[Sequence, list[TokenArray]]:
        """See `Drafter`."""
        drafts = super().draft(wanted)
        for sequence in wanted:
            shadow = self._shadows[sequence]
            assert isinstance(shadow, LayerShadow)
            shadow.known.forget_before(min(shadow.num_read, shadow.num_computed))
        return drafts

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """See `Drafter`."""
        super().observe(item, result)
        if result.states is not None:
            known = self._known.setdefault(item.sequence, KnownStates())
            known.take(result.states, item.sequence.num_tokens + len(result.sampled))

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        super().forget(sequence)
        self._known.pop(sequence, None)

    def _new_shadow(self, sequence: Sequence) -> LayerShadow:
        shadow = LayerShadow.from_request(
            self._request(sequence.request), block_size=self._executor.kv.shape.block_size, order=sequence.order
        )
        assert isinstance(shadow, LayerShadow)
        shadow.known = self._known[sequence]
        return shadow

    def _shadow(self, sequence: Sequence) -> Shadow:
        """See `ModelDrafter`. Everything after the tokens that were read with the model's states is void."""
        before = self._shadows.get(sequence)
        if isinstance(before, LayerShadow):
            before.num_computed = min(before.num_computed, before.num_read)
            before.outputs.clear()
        shadow = super()._shadow(sequence)
        assert isinstance(shadow, LayerShadow)
        if shadow.num_computed < shadow.known.begin:
            self._release(shadow)
            shadow.first = shadow.num_computed = shadow.num_ready = shadow.known.begin
        return shadow

    def _took(self, shadow: Shadow, result: StepResult) -> None:
        assert isinstance(shadow, LayerShadow)
        shadow.num_read = min(shadow.num_computed, shadow.known.end)
        if result.states is not None:
            shadow.outputs.extend(result.states)
