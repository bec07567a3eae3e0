"""How much of a prompt a step may hold beside the answers that decode in it.

Every token of a running answer waits for one whole step. A step with prompts may take as long as the objective of each
answer for its mean gap, and an answer that is ahead of it also gives what its steps have spared until now. So prompts
that seldom come are computed in as few steps as without answers beside them, and prompts that never cease slow the
answers down to their objectives, not further. An objective that the step would miss without any prompt does not count:
it cannot be kept. Tokens that grammars force (`MAX_FORCED_TOKENS` a step) are computed beside answers whatever these
were promised.

A prompt in its step costs a fixed time, large with some engines (vLLM's runner on CPUs), however few its tokens. Chunks
that are too small would multiply it: prompts would take twice as long, and answers would wait longer in all. So the
first prompt of a step gets enough tokens to keep that share small, also where the step then misses an objective.
"""

import math
from collections.abc import Iterable

from common.timing import StepShape, TimingModel
from engine.sequence import Sequence

STEP_SHARE = 0.95
"""Share of an objective that a step with prompts may take beside an answer that has only just begun."""
SPARED_SHARE = 0.8
"""Share of that up to which the mean gap of an older answer may rise: what its steps have taken is estimated."""
MAX_CHUNKS = 8
"""Most steps that share the prompt tokens of a full one, so that prompts go on under any objective."""
MAX_FIXED_SHARE = 1 / 8
"""Most time that a step may take for holding a prompt at all, as a share of the time that grows with its tokens."""


class StepBudget:
    """Bounds prompts by time. Engine thread only."""

    def __init__(self) -> None:
        self._timing: TimingModel | None = None
        """Model of the steps; None: only their tokens are bounded."""
        self._delays_s = 0.0
        """Time by which prompts have prolonged steps, since the start."""

    def take_timing(self, timing: TimingModel) -> None:
        """Use a model of the steps from now on."""
        self._timing = timing

    def max_step_s(self, decodes: StepShape, running: Iterable[Sequence], *, now_s: float) -> float:
        """Return the time that a step with `decodes`, which are some of `running`, may take with prompts."""
        if self._timing is None or not decodes.num_decodes:
            return math.inf
        alone_s = self._timing.itl_s(decodes.num_decodes, decodes.num_context_tokens)
        decoding = (sequence for sequence in running if sequence.num_to_run <= 1)
        return min((self._allowance_s(sequence, alone_s, now_s) for sequence in decoding), default=math.inf)

    def _allowance_s(self, sequence: Sequence, alone_s: float, now_s: float) -> float:
        limit_s = STEP_SHARE * sequence.request.tpot_slo_s
        if not alone_s < limit_s < math.inf:
            return math.inf
        if sequence.decodes_since is None:
            sequence.decodes_since = now_s, self._delays_s
        began_s, delays_before_s = sequence.decodes_since
        elapsed_s, delayed_s = now_s - began_s, self._delays_s - delays_before_s
        # Without the delays, its steps have taken about as long as this one would alone.
        spared_s = max(0.0, elapsed_s - delayed_s) / alone_s * SPARED_SHARE * limit_s - elapsed_s
        return limit_s + max(0.0, spared_s)

    def launched(self, shape: StepShape) -> None:
        """Count a step."""
        if self._timing is not None and shape.num_decodes and shape.num_prefill_tokens:
            alone_s = self._timing.itl_s(shape.num_decodes, shape.num_context_tokens)
            self._delays_s += max(0.0, self._timing.step_s(shape) - alone_s)

    def num_fitting(self, shape: StepShape, *, num_before: int, max_s: float, max_tokens: int) -> int:
        """Return how many tokens of a prompt, after `num_before`, fit into a step of `max_s` beside what it holds."""
        num_left = max_tokens - shape.num_prefill_tokens - shape.num_decodes
        if self._timing is None or max_s == math.inf:
            return num_left
        num_fitting = self._timing.chunk_within(max_s, num_before=num_before, beside=shape)
        if not shape.num_prefill_tokens:  # the first prompt goes on in any case
            num_worthwhile = self._num_worthwhile(shape, num_before, max_tokens)
            num_fitting = max(num_fitting, max_tokens // MAX_CHUNKS, num_worthwhile)
        return min(num_left, num_fitting)

    def _num_worthwhile(self, decodes: StepShape, num_before: int, max_tokens: int) -> int:
        """Return the fewest tokens of a prompt, after `num_before`, for which the step's fixed time is small."""
        assert self._timing is not None, "without a model, steps are not cut"
        prefill = self._timing.prefill
        fixed_s = prefill.seconds(decodes) - self._timing.decode.seconds(decodes)
        token_s = prefill.per_prefill_token_s + prefill.per_prefill_pair_s * num_before
        enough_s = fixed_s / MAX_FIXED_SHARE
        if enough_s <= 0:
            return 0
        return max_tokens if enough_s >= max_tokens * token_s else math.ceil(enough_s / token_s)
