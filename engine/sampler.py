"""Chooses the next token of every row of a batch.

Each row goes through these steps, in this order; a step that its parameters leave out is skipped:

1. log-probabilities, when asked for: float32, from the logits as the model gave them
2. logit bias, added
3. min_tokens: tokens that would end the sample become impossible (end-of-sequence unless ignore_eos, stop tokens)
4. penalties: repetition (prompt and output), then frequency and presence (output)
5. temperature 0: the largest logit, the smallest token id of equals. Else:
6. temperature
7. top-k: the k best tokens, of equals the smaller ids
8. top-p: the fewest best tokens whose share of what top-k left reaches p, of equals the smaller ids
9. min-p: tokens at least min_p times as probable as the best one
10. the choice: an exponential race. Token t arrives after E(t) / probability(t), where the E(t) are independent
    exponential times, a hash of (seed, sample index, token index, t); the first to arrive is chosen

vLLM has this order too, but for min-p, which it applies before top-k; that changes only the mass that top-p measures
against. transformers has repetition before min_tokens, which comes to the same, and min-p last, as here. Both keep
every token that ties with the k-th one; here exactly k are kept.

The race (the Gumbel-max trick without the logarithms) is exact, and it is stable: when another batch composition or
another device moves the probabilities by 1e-6, only a photo finish of the two best can turn out otherwise. Inverting
the cumulative distribution would not do: each of its 50,000 boundaries moves, and about one draw in a thousand changes
(measured on SmolLM2 in float32). No random generator exists, so a row's answer depends on nothing but the row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from common.errors import EngineFault
from common.sampling import SamplingParams
from engine.executor import Logprobs, Sampled
from engine.logits import (
    SamplingRow,
    forbidden_token_ids,
    gather_logprobs,
    position_logprobs,
    rank_logits,
    shape_logits,
)
from engine.noise import noise_keys

__all__ = ["Sampler", "SamplingRow", "position_logprobs"]

# How many best tokens are looked at; a row gets the first width that suffices, else the whole vocabulary.
_WIDTHS = (64, 1024, 8192)
# With top-p alone nobody knows beforehand; rows whose mass lies wider are done again with the next width.
_NUCLEUS_WIDTH = 1024
_INVALID = -1
# SplitMix64's constants, as int64.
_GAMMA, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Sampler:
    """Chooses tokens. Holds no state between calls. Engine thread only."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Return the chosen token of each row of logits [len(rows), vocab_size], any float dtype; does not mutate them.

        Waits for the device once, at the end (and before, when a row has top-p without top-k). Raises EngineFault
        when a row has no finite largest logit.
        """
        assert logits.shape == (len(rows), self._vocab_size), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        if not rows:
            return []
        plain = [i for i, row in enumerate(rows) if row.params.is_greedy and not self._is_shaped(row)]
        if len(plain) == len(rows):
            chosen = _argmax(logits)
        else:
            chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
            others = sorted(set(range(len(rows))).difference(plain))
            shaped = logits[others].float()
            shape_logits(shaped, [rows[i] for i in others], self._eos_token_ids)
            chosen[others] = _choose(shaped, [rows[i] for i in others])
            if plain:
                chosen[plain] = _argmax(logits[plain])
        logprobs = self._logprobs(logits, chosen, rows)
        token_ids = chosen.tolist()
        if _INVALID in token_ids:
            raise EngineFault(f"logits of row {token_ids.index(_INVALID)} have no finite maximum")
        return [Sampled(token_id=token, logprobs=logprobs.get(i)) for i, token in enumerate(token_ids)]

    def _is_shaped(self, row: SamplingRow) -> bool:
        params = row.params
        return params.has_penalties or bool(params.logit_bias) or bool(forbidden_token_ids(row, self._eos_token_ids))

    def _logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, Logprobs]:
        """Return the log-probabilities of the rows that ask for them."""
        wanted = {i: row.params.num_logprobs for i, row in enumerate(rows) if row.params.num_logprobs is not None}
        if not wanted:
            return {}
        indices = list(wanted)
        found = gather_logprobs(logits[indices], chosen[indices].clamp(min=0), max(wanted.values()))
        return {
            i: Logprobs(token_id=each.token_id, logprob=each.logprob, top=each.top[:num_top])
            for (i, num_top), each in zip(wanted.items(), found, strict=True)
        }


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return the chosen token ids (int64 [rows]) for shaped logits [rows, vocab], greedy rows among them."""
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    by_width: dict[int | None, list[int]] = {}
    greedy: list[int] = []
    for i, row in enumerate(rows):
        members = greedy if row.params.is_greedy else by_width.setdefault(_width(row.params, logits.shape[-1]), [])
        members.append(i)
    if greedy:
        chosen[greedy] = _argmax(logits[greedy])
    for width, members in by_width.items():
        batch = _Batch(logits[members], [rows[i] for i in members])
        chosen[members] = batch.choose_from_all() if width is None else batch.choose_from_best(width)
    return chosen


def _width(params: SamplingParams, vocab_size: int) -> int | None:
    """Return how many best tokens to rank for a row; None when nothing in it needs a ranking."""
    if 0 < params.top_k < vocab_size:
        needed = params.top_k
    elif params.top_p < 1.0:
        needed = _NUCLEUS_WIDTH
    else:
        return None
    return _round_up(needed, vocab_size)


def _round_up(width: int, vocab_size: int) -> int:
    return next((known for known in _WIDTHS if width <= known < vocab_size), vocab_size)


class _Batch:
    """Rows that are sampled in the same way. Logits [rows, vocab] float32; columns [rows, 1] float64."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        self._logits = logits
        self._rows = rows
        self._peak = logits.amax(dim=-1, keepdim=True).double()
        self._temperature = self._column([row.params.temperature for row in rows])
        self._min_p = self._column([row.params.min_p for row in rows])
        keys = noise_keys(
            [row.params.seed for row in rows], [row.sample_index for row in rows], [row.token_index for row in rows]
        )
        self._keys = torch.from_numpy(keys.view(np.int64)).to(logits.device).unsqueeze(1)

    def choose_from_all(self) -> torch.Tensor:
        """Return token ids when neither top-k nor top-p is set."""
        weights = self._drop_improbable(self._weigh(self._logits))
        token_ids = torch.arange(weights.shape[-1], device=weights.device)
        return self._checked((weights / waiting_times(self._keys, token_ids)).argmax(dim=-1))

    def choose_from_best(self, width: int) -> torch.Tensor:
        """Return token ids from the `width` best tokens, or from more where a nucleus reaches beyond these."""
        vocab_size = self._logits.shape[-1]
        values, token_ids = rank_logits(self._logits, width)
        has_top_k = [0 < row.params.top_k < vocab_size for row in self._rows]
        top_k = self._column([row.params.top_k or vocab_size for row in self._rows])
        weights = self._weigh(values) * (torch.arange(width, device=values.device) < top_k)
        total = weights.sum(dim=-1, keepdim=True)
        if not all(has_top_k):  # the whole vocabulary is what top-p measures against
            everything = self._weigh(self._logits).sum(dim=-1, keepdim=True)
            total = torch.where(self._column(has_top_k) == 1, total, everything)
        top_p = self._column([row.params.top_p for row in self._rows])
        mass = torch.where(top_p < 1.0, top_p * total, torch.inf)
        reached = weights.cumsum(dim=-1)
        kept = self._drop_improbable(weights * (reached - weights < mass))
        position = (kept / waiting_times(self._keys, token_ids)).argmax(dim=-1, keepdim=True)
        chosen = self._checked(token_ids.gather(-1, position).squeeze(1))
        if width < vocab_size and not all(has_top_k):
            is_cut = (reached[:, -1] < mass[:, 0]).tolist()
            again = [i for i in range(len(is_cut)) if is_cut[i] and not has_top_k[i]]
            if again:
                wider = _Batch(self._logits[again], [self._rows[i] for i in again])
                chosen[again] = wider.choose_from_best(_round_up(width + 1, vocab_size))
        return chosen

    def _weigh(self, logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities relative to the best token's, float64: 1 for that one, whatever the temperature."""
        return ((logits.double() - self._peak) / self._temperature).exp_()

    def _drop_improbable(self, weights: torch.Tensor) -> torch.Tensor:
        if all(row.params.min_p == 0.0 for row in self._rows):
            return weights
        return weights.masked_fill(weights < self._min_p, 0.0)

    def _checked(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.where(self._peak.isfinite().squeeze(1), token_ids, _INVALID)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._logits.device).unsqueeze(1)


def waiting_times(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return independent exponential times, float64 > 0, of the broadcast shape of int64 keys [rows, 1] and token ids.

    Token t of a row takes output t of the SplitMix64 generator that starts at the row's key (Steele, Lea, Flood: "Fast
    splittable pseudorandom number generators", OOPSLA 2014), whose outputs can be computed in any order.
    """
    bits = keys + (token_ids + 1) * _GAMMA  # int64 wraps, as the generator's arithmetic does
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = _shift(bits ^ _shift(bits, 31), 12)
    return -torch.log((bits.double() + 0.5) * 2.0**-52)  # strictly between 0 and 1 before the logarithm


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 shifted right as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit's index (int64 [rows]), the first one of equals; _INVALID when it is not finite."""
    token_ids = logits.argmax(dim=-1)
    peak = logits.gather(-1, token_ids.unsqueeze(1)).squeeze(1)
    return torch.where(peak.isfinite(), token_ids, _INVALID)
