"""What the sampler asks of logits: shaping them in place, ranking them, reading log-probabilities off them.

Everything works on whole batches, on the logits' device, and never waits for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.sampling import SamplingParams
from engine.executor import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """All that the choice of one token depends on, besides its logits."""

    params: SamplingParams
    sample_index: int
    token_index: int
    """Position in the sample's output; the number of tokens generated before."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    @property
    def must_go_on(self) -> bool:
        """Whether the sample is still shorter than `min_tokens`."""
        return self.token_index < self.params.min_tokens


def forbidden_token_ids(row: SamplingRow, eos_token_ids: Collection[int]) -> set[int]:
    """Return the tokens that `min_tokens` keeps from being chosen: those that would end the sample."""
    if not row.must_go_on:
        return set()
    ends = set(row.params.stop_token_ids)
    return ends if row.params.ignore_eos else ends.union(eos_token_ids)


def shape_logits(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> None:
    """Apply logit bias, the min_tokens mask and the penalties to logits [len(rows), vocab] (float32). Mutates them."""
    bias = [(i, token, value) for i, row in enumerate(rows) for token, value in row.params.logit_bias]
    if bias:
        row_idx, token_ids, values = zip(*bias, strict=True)
        cells = (_ints(row_idx, logits), _ints(token_ids, logits))
        logits.index_put_(cells, _floats(values, logits), accumulate=True)
    masked = [(i, token) for i, row in enumerate(rows) for token in forbidden_token_ids(row, eos_token_ids)]
    if masked:
        row_idx, token_ids = zip(*masked, strict=True)
        logits[_ints(row_idx, logits), _ints(token_ids, logits)] = -torch.inf
    penalized = [i for i, row in enumerate(rows) if row.params.has_penalties]
    if penalized:
        logits[penalized] = _penalize(logits[penalized], [rows[i] for i in penalized])


def _penalize(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return logits [rows, vocab] after repetition (prompt and output), frequency and presence (output) penalties."""
    params = [row.params for row in rows]
    output_counts = _count_tokens([row.output_token_ids for row in rows], logits)
    in_output = output_counts > 0
    if any(p.repetition_penalty != 1.0 for p in params):
        seen = in_output | (_count_tokens([row.prompt_token_ids for row in rows], logits) > 0)
        penalty = _floats([p.repetition_penalty for p in params], logits).unsqueeze(1)
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, repeated, logits)
    frequency = _floats([p.frequency_penalty for p in params], logits).unsqueeze(1)
    presence = _floats([p.presence_penalty for p in params], logits).unsqueeze(1)
    return logits - frequency * output_counts - presence * in_output


def _count_tokens(token_ids: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """Return how often each token occurs in each row, float32 [rows, vocab] (exact below 2**24)."""
    num_rows, vocab_size = like.shape
    offsets = np.repeat(np.arange(num_rows) * vocab_size, [len(ids) for ids in token_ids])
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in token_ids]) + offsets
    cells = torch.from_numpy(flat).to(like.device)
    counts = torch.zeros(num_rows * vocab_size, dtype=torch.float32, device=like.device)
    counts.scatter_add_(0, cells, torch.ones((), device=like.device).expand(len(flat)))
    return counts.view(num_rows, vocab_size)


def rank_logits(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values (float32) and token ids (int64) of the best tokens, [rows, num_top], best first.

    Of equal logits the smaller token id comes first. `torch.topk` alone leaves that open, so it is given one integer
    per token that carries both: the value's bits, mapped so that integers order as floats do, above the reversed id.
    """
    vocab_size = logits.shape[-1]
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal, their bits are not
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of negative floats the larger magnitude is the smaller number
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | reversed_ids
    token_ids = torch.topk(keys, num_top, dim=-1).indices
    return logits.gather(-1, token_ids).float(), token_ids


def position_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Logprobs]:
    """Return the log-probability of one given token per row, and of the num_top best ones, from logits [rows, vocab].

    Computed in float32 from the logits as they are; of equally probable tokens the smaller id comes first. Waits for
    the device.
    """
    return gather_logprobs(logits, _ints(token_ids, logits), num_top)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[Logprobs]:
    """Return `position_logprobs` for token ids that lie on the device, int64 [rows]."""
    normalizer = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    chosen = (logits.gather(-1, token_ids.unsqueeze(1)).float() - normalizer).squeeze(1)
    top_values, top_ids = rank_logits(logits, num_top)
    columns = zip(
        token_ids.tolist(), chosen.tolist(), top_ids.tolist(), (top_values - normalizer).tolist(), strict=True
    )
    return [
        Logprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in columns
    ]


def _ints(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _floats(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
