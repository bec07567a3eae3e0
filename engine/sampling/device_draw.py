"""The random choice on devices, without sorting where Triton is installed; `cut` and `race` are torch's reference.

Rows that nothing shapes are drawn inside a decode step's graph (`RaceColumns`), the others behind it
(`draw_on_device`). `engine.sampling.sampler` documents the order of the steps.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.device.columns import Column, PackedColumns
from engine.sampling.draw import Draw, first_best, keys_of, waiting_times
from engine.sampling.logits import SamplingRow, rank_logits

Kept: TypeAlias = tuple[Tensor, Tensor]
"""Each row's last kept logit, float32 [rows], and the last kept id of those equal to it, int64 [rows]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceColumns:
    """Parameters of rows that race, as columns [rows]; rows of temperature 0 do not."""

    temperature: Column
    min_p: Column
    """float64; 0 for rows without min-p."""
    top_k: Column
    """float64; 0 for rows without top-k."""
    top_p: Column
    keys: Column
    """Keys of each row's noise, int64."""

    @classmethod
    def add(cls, rows: Sequence[SamplingRow], size: int, columns: PackedColumns) -> "RaceColumns":
        """Add the columns, padded to `size`. Rows that `races` refuses get temperature 0."""
        temperature, min_p, top_k, top_p = np.zeros(size), np.zeros(size), np.zeros(size), np.ones(size)
        keys = np.zeros(size, dtype=np.uint64)
        racing = [i for i, row in enumerate(rows) if races(row)]
        params = [rows[i].params for i in racing]
        temperature[racing] = [p.temperature for p in params]
        min_p[racing] = [p.min_p for p in params]
        top_k[racing] = [p.top_k for p in params]
        top_p[racing] = [p.top_p for p in params]
        if racing:
            keys[racing] = keys_of([rows[i] for i in racing])
        return cls(
            temperature=columns.add(temperature),
            min_p=columns.add(min_p),
            top_k=columns.add(top_k),
            top_p=columns.add(top_p),
            keys=columns.add(keys.view(np.int64)),
        )

    def choose(self, logits: Tensor, best_ids: Tensor, words: Tensor) -> Tensor:
        """Return token ids, int64 [rows], given float32 logits, their `first_best` and the uploaded columns.

        Never waits, and allocates the same whatever the columns hold: a graph may capture it.
        """
        cuts = (self.top_k.of(words), self.top_p.of(words))
        return _choose(logits, best_ids, self.temperature.of(words), cuts, (self.min_p.of(words), self.keys.of(words)))


def draw_on_device(draw: Draw) -> Tensor:
    """Return the token ids of a draw, int64 [rows]: a `DrawKernel`. Never waits."""
    top_p, keys = draw.top_p.squeeze(1), draw.keys.squeeze(1)
    min_p = torch.zeros_like(top_p) if draw.min_p is None else draw.min_p.squeeze(1)
    cuts = (draw.top_k.squeeze(1), top_p)
    return _choose(draw.logits, first_best(draw.logits), draw.temperature.squeeze(1), cuts, (min_p, keys))


def _choose(
    logits: Tensor, best_ids: Tensor, temperature: Tensor, cuts: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor]
) -> Tensor:
    """Return token ids, int64 [rows], given float32 logits, their `first_best` and columns [rows].

    `cuts` are top-k and top-p, `rest` min-p and the keys of the noise.
    """
    cut_tokens, race_tokens = _kernels_for(logits.device)
    return race_tokens(logits, best_ids, temperature, *rest, cut_tokens(logits, best_ids, temperature, *cuts))


def races(row: SamplingRow) -> bool:
    """Whether a row draws from its logits as they are and tests no drafted token."""
    return not row.params.is_greedy and row.tested < 0 and row.has_plain_logits


def cut(logits: Tensor, best_ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Kept:
    """Return what top-k and top-p keep of each row; the reference of `engine.sampling.cut`. It sorts the vocabulary."""
    vocab_size = logits.shape[-1]
    is_cut = (temperature > 0) & (best_ids >= 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))
    values, token_ids = rank_logits(logits, vocab_size)
    weights = values.double().sub_(values[:, :1].double())
    weights = weights.div_(temperature.masked_fill(~is_cut, 1.0).unsqueeze(1)).exp_()
    weights *= torch.arange(vocab_size, device=logits.device) < top_k.masked_fill(top_k == 0, vocab_size).unsqueeze(1)
    mass = (top_p * weights.sum(dim=-1)).masked_fill_(top_p == 1.0, torch.inf).unsqueeze(1)
    is_kept = weights.cumsum(dim=-1) - weights < mass
    num_kept = torch.minimum(is_kept.sum(dim=-1), top_k.masked_fill(top_k == 0, vocab_size).long())
    last = (num_kept.clamp(min=1, max=vocab_size) - 1).unsqueeze(1)
    last_logits = values.gather(1, last).squeeze(1).masked_fill(~is_cut, -torch.inf)
    return last_logits, token_ids.gather(1, last).squeeze(1).masked_fill(~is_cut, vocab_size)


def race(
    logits: Tensor,
    best_ids: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    keys: Tensor,
    kept: Kept,
) -> Tensor:
    """Return the tokens that win; the reference of `engine.sampling.race`, with the same parameters."""
    is_racing = (temperature > 0) & (best_ids >= 0)
    peak = logits.gather(1, best_ids.clamp(min=0).unsqueeze(1)).double()
    weights = logits.double().sub_(peak).div_(temperature.masked_fill(~is_racing, 1.0).unsqueeze(1)).exp_()
    weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    last_logits, last_ids = (each.unsqueeze(1) for each in kept)
    is_kept = (logits > last_logits) | ((logits == last_logits) & (token_ids <= last_ids))
    weights.masked_fill_(~is_kept, 0.0)
    times = waiting_times(keys.unsqueeze(1), token_ids)
    return torch.where(is_racing, weights.div_(times).argmax(dim=-1), best_ids)


@functools.cache
def _kernels_for(device: torch.device) -> tuple[Callable[..., Kept], Callable[..., Tensor]]:
    """Return what does as `cut` and `race` on a device: Triton's kernels on a GPU, where it is installed."""
    if device.type == "cuda":
        with suppress(ImportError):
            from engine.sampling import cut as cut_kernel
            from engine.sampling import race as race_kernel

            return cut_kernel.cut, race_kernel.race
    return cut, race
