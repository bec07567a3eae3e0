"""Turns vLLM's tokens of a sample into ours: where it ends is decided here, as for every engine."""

from common.wire_names import FinishReason
from engine.events import TokenOutput
from engine.executor import Logprobs
from engine.sequence import Sequence


def token_output(
    sequence: Sequence, token_id: int, logprobs: Logprobs | None, *, eos_token_ids: frozenset[int]
) -> TokenOutput:
    """Return the output for a token that is about to be appended to `sequence`."""
    return TokenOutput(
        sample_index=sequence.sample_index,
        token_index=sequence.num_output_tokens,
        token_id=token_id,
        logprobs=logprobs,
        finish_reason=_finish_reason(sequence, token_id, eos_token_ids),
    )


def _finish_reason(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    sampling = sequence.request.sampling
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if token_id in eos_token_ids and not sampling.ignore_eos:
        # A grammar that exceeds its limits cuts the answer, which must not look finished.
        return FinishReason.LENGTH if sequence.is_cut else FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens + 1 >= sequence.max_num_tokens else None
