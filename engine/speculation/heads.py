"""Drafts from heads on the model's last hidden state.

The state comes with the step that sampled the last token. So there is none, and nothing is drafted, in the first step
after a handoff, where another worker has computed that token, nor behind a token that a grammar has forced.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from common.timing import StepShape
from common.tokens import TokenArray, as_tokens
from engine.executor import Hidden, ScheduledSequence, StepResult
from engine.sequence import Sequence
from engine.speculation.costs import StepCosts
from engine.speculation.rates import TreeRates

TRIAL_STEPS = 256
"""Steps without a draft after which one token is drafted to see whether it pays now."""
_PRIOR_RATES = (0.5, 0.4, 0.3, 0.3, 0.3)
_PRIOR_BRANCH_RATES = (0.1, 0.06, 0.04, 0.03)

Propose = Callable[[npt.NDArray[np.float32], int, int], tuple[list[list[int]], list[list[int]]]]
"""Returns for hidden states [rows, hidden] the tokens of the first heads, and of the first head the next likeliest."""


class HeadsDrafter:
    """A `Drafter` by heads. Every step has to return hidden states (`StepResult.states`)."""

    def __init__(self, propose: Propose, *, num_heads: int, num_branches: int = 0) -> None:
        """`num_branches`: most tokens beside the first head's likeliest."""
        self._propose = propose
        self._num_heads = num_heads
        self._num_branches = num_branches
        self._states: dict[Sequence, tuple[int, Hidden]] = {}
        """Number of tokens of a sequence behind which the heads continue, and the state that they continue from."""
        self._rates = TreeRates(_PRIOR_RATES, _PRIOR_BRANCH_RATES, num_branches=num_branches, trial_steps=TRIAL_STEPS)
        self._costs = StepCosts()

    def prospects(self, sequence: Sequence, max_tokens: int) -> list[list[float]]:
        """See `Drafter`."""
        num_tokens, _state = self._states.get(sequence, (-1, None))
        if num_tokens != sequence.num_tokens or max_tokens < 1:
            return []
        return self._rates.prospects(sequence, min(max_tokens, self._num_heads))

    def draft(self, wanted: Mapping[Sequence, Seq[int]]) -> dict[Sequence, list[TokenArray]]:
        """See `Drafter`."""
        began_s = time.perf_counter()
        states = np.stack([self._states[sequence][1] for sequence in wanted])
        proposed = self._propose(states, max(lens[0] for lens in wanted.values()), self._num_branches)
        self._costs.observe(StepShape(num_decodes=len(wanted)), time.perf_counter() - began_s)
        drafts: dict[Sequence, list[TokenArray]] = {}
        for (sequence, lens), token_ids, others in zip(wanted.items(), *proposed, strict=True):
            self._rates.drafted(sequence, others)
            taken = [token_id for token_id, length in zip(others, lens[1:], strict=False) if length]
            drafts[sequence] = [as_tokens(token_ids[: lens[0]]), *(as_tokens([token_id]) for token_id in taken)]
        return drafts

    def costs_s(self, num_sequences: int, num_tokens: int) -> list[float] | None:
        """See `Drafter`. All heads of a step are computed together; nothing is known before the first ones."""
        self._rates.count_step()
        step_s = self._costs.predict(num_sequences, 0)
        return [0.0, *step_s * num_tokens] if step_s else None

    def observe(self, item: ScheduledSequence, result: StepResult) -> None:
        """See `Drafter`."""
        sequence = item.sequence
        self._rates.observe(item, result)
        if result.states is not None:
            self._states[sequence] = sequence.num_tokens + len(result.sampled), result.states[-1]

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._rates.forget(sequence)
        self._states.pop(sequence, None)
