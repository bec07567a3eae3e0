"""Drafts from heads on the model's last hidden state.

The state comes with the step that sampled the last token. So there is none, and nothing is drafted, in the first step
after a handoff, where another worker has computed that token, nor behind a token that a grammar has forced.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from common.timing import StepShape
from common.tokens import TokenArray, as_tokens
from engine.executor import Hidden, StepResult
from engine.sequence import Sequence
from engine.speculation.costs import StepCosts
from engine.speculation.rates import DepthRates

TRIAL_STEPS = 256
"""Steps without a draft after which one token is drafted to see whether it pays now."""
_PRIOR_RATES = (0.5, 0.4, 0.3, 0.3, 0.3)

Propose = Callable[[npt.NDArray[np.float32], int], list[list[int]]]
"""Returns the tokens of the first heads for hidden states [rows, hidden]."""


class HeadsDrafter:
    """A `Drafter` by heads. Every step has to return hidden states (`StepResult.last_hidden`)."""

    def __init__(self, propose: Propose, *, num_heads: int) -> None:
        self._propose = propose
        self._num_heads = num_heads
        self._states: dict[Sequence, tuple[int, Hidden]] = {}
        """Number of tokens of a sequence behind which the heads continue, and the state that they continue from."""
        self._rates = DepthRates(_PRIOR_RATES, trial_steps=TRIAL_STEPS)
        self._costs = StepCosts()

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[float]:
        """See `Drafter`."""
        num_tokens, _state = self._states.get(sequence, (-1, None))
        if num_tokens != sequence.num_tokens:
            return []
        return self._rates.prospects(sequence, max(0, min(max_tokens, self._num_heads)))

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, TokenArray]:
        """See `Drafter`."""
        began_s = time.perf_counter()
        states = np.stack([self._states[sequence][1] for sequence in wanted])
        proposed = self._propose(states, max(wanted.values()))
        self._costs.observe(StepShape(num_decodes=len(wanted)), time.perf_counter() - began_s)
        pairs = zip(wanted.items(), proposed, strict=True)
        return {sequence: as_tokens(token_ids[:num_tokens]) for (sequence, num_tokens), token_ids in pairs}

    def costs_s(self, num_sequences: int, num_tokens: int) -> list[float] | None:
        """See `Drafter`. All heads of a step are computed together; nothing is known before the first ones."""
        self._rates.count_step()
        step_s = self._costs.predict(num_sequences, 0)
        return [0.0, *step_s * num_tokens] if step_s else None

    def observe(self, sequence: Sequence, num_drafted: int, result: StepResult) -> None:
        """See `Drafter`."""
        if num_drafted:
            self._rates.observe(sequence, num_drafted, result.num_accepted)
        if result.last_hidden is not None:
            self._states[sequence] = sequence.num_tokens + len(result.sampled), result.last_hidden

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._rates.forget(sequence)
        self._states.pop(sequence, None)
