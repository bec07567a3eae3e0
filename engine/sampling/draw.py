"""The random choice: filters on probabilities, and the exponential race among the tokens that they leave.

Works on whole batches of shaped logits, on their device; `engine.sampling.sampler` documents the order of the steps.
Python numbers go into `masked_fill`, not into `torch.where`, which may copy them to the device and wait.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.device.columns import Column, PackedColumns
from engine.sampling.logits import SamplingRow, rank_logits
from engine.sampling.noise import noise_keys

INVALID = -1
"""Token id of a row whose logits have no finite maximum."""

# Numbers of best tokens to rank; a row gets the first width that suffices, else the whole vocabulary.
_WIDTHS = (64, 1024, 8192)
# Logits drawn from at a time; each has some 8-byte temporaries.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 18, 1 << 23
# SplitMix64's constants, as int64.
_GAMMA, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def first_best(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit's index (int64 [rows]), the first one of equals; INVALID when it is not finite."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32:
        peak, token_ids = logits.max(dim=-1)
        return token_ids.masked_fill(~peak.isfinite(), INVALID)
    # On a CPU torch vectorises maxima, but not their positions. numpy does both, and like torch prefers a NaN.
    values = logits.numpy()
    best = values.argmax(axis=-1)
    return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(values)), best]), best, INVALID))


def round_up_width(num_tokens: int, vocab_size: int) -> int:
    """Return how many best tokens to rank when `num_tokens` are needed: few widths, so that rows can share one."""
    return next((width for width in _WIDTHS if num_tokens <= width < vocab_size), vocab_size)


def keys_of(rows: Sequence[SamplingRow]) -> npt.NDArray[np.uint64]:
    """Return the keys of each row's noise."""
    return noise_keys(
        [row.params.seed for row in rows], [row.sample_index for row in rows], [row.token_index for row in rows]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """Parameters of rows that are drawn in the same way, as columns [rows]."""

    temperature: Column
    top_k: Column
    """float64; the vocabulary size for rows without top-k."""
    has_top_k: Column | None
    """int64, 0 or 1; None: every row has a top-k."""
    top_p: Column
    min_p: Column | None
    """float64; None: no row has a min-p."""
    keys: Column
    """Keys of each row's noise, int64."""
    tested: Column | None
    """Token that the rejection rule accepts or not, int64; -1: the race chooses alone. None: it does in every row."""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int, columns: PackedColumns) -> "DrawPlan":
        """Add the columns of these rows."""
        params = [row.params for row in rows]
        has_top_k = [0 < p.top_k < vocab_size for p in params]
        return cls(
            temperature=columns.floats([p.temperature for p in params]),
            top_k=columns.floats([p.top_k or vocab_size for p in params]),
            has_top_k=None if all(has_top_k) else columns.ints(has_top_k),
            top_p=columns.floats([p.top_p for p in params]),
            min_p=columns.floats([p.min_p for p in params]) if any(p.min_p for p in params) else None,
            keys=columns.ints(keys_of(rows).view(np.int64)),
            tested=None if all(row.tested < 0 for row in rows) else columns.ints([row.tested for row in rows]),
        )

    def on_device(self, logits: torch.Tensor, words: torch.Tensor) -> "Draw":
        """Return the draw from these rows' logits, given the uploaded columns."""

        def column(planned: Column | None) -> torch.Tensor | None:
            return None if planned is None else planned.of(words).unsqueeze(1)

        return Draw(
            logits=logits,
            peak=logits.amax(dim=-1, keepdim=True).double(),
            temperature=self.temperature.of(words).unsqueeze(1),
            top_k=self.top_k.of(words).unsqueeze(1),
            has_top_k=column(self.has_top_k),
            top_p=self.top_p.of(words).unsqueeze(1),
            min_p=column(self.min_p),
            keys=self.keys.of(words).unsqueeze(1),
            tested=column(self.tested),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Rows that are drawn in the same way: logits [rows, vocab] float32; the parameters of `DrawPlan`, [rows, 1]."""

    logits: torch.Tensor
    peak: torch.Tensor
    """The largest logit, float64."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    has_top_k: torch.Tensor | None
    top_p: torch.Tensor
    min_p: torch.Tensor | None
    keys: torch.Tensor
    tested: torch.Tensor | None

    def split(self) -> "Iterator[Draw]":
        """Yield parts, in order, whose temporary values take little memory: on a CPU they fit into its caches."""
        limit = _CPU_ELEMENTS if self.logits.device.type == "cpu" else _DEVICE_ELEMENTS
        num_rows = max(1, limit // self.logits.shape[-1])
        for begin in range(0, len(self.logits), num_rows):
            yield self._select(slice(begin, begin + num_rows))

    def from_all(self) -> torch.Tensor:
        """Return token ids for rows without top-k and top-p."""
        weights = self._drop_improbable(self._weigh(self.logits))
        token_ids = torch.arange(weights.shape[-1], device=weights.device)
        return self._checked(self._race(weights, token_ids).squeeze(1))

    def from_best(self, width: int) -> torch.Tensor:
        """Return token ids from the `width` best tokens, which must suffice."""
        return self._from_best(width)[0]

    def from_nucleus(self, width: int) -> torch.Tensor:
        """Return token ids from the `width` best tokens, or from more where a nucleus is larger.

        Waits for the device to find these rows.
        """
        chosen, is_cut = self._from_best(width)
        again = is_cut.nonzero().squeeze(1)
        if len(again):
            wider = self._select(again).from_nucleus(round_up_width(width + 1, self.logits.shape[-1]))
            chosen.index_copy_(0, again, wider)
        return chosen

    def _from_best(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids, and for which rows (bool) more than `width` tokens belong to the nucleus."""
        values, token_ids = rank_logits(self.logits, width)
        weights = self._weigh(values) * (torch.arange(width, device=values.device) < self.top_k)
        total = weights.sum(dim=-1, keepdim=True)
        if self.has_top_k is not None and width < self.logits.shape[-1]:
            # Without top-k, top-p is a share of the whole vocabulary's mass.
            everything = self._weigh(self.logits).sum(dim=-1, keepdim=True)
            total = torch.where(self.has_top_k == 1, total, everything)
        mass = (self.top_p * total).masked_fill_(self.top_p == 1.0, torch.inf)
        reached = weights.cumsum(dim=-1)
        kept = self._drop_improbable(weights * (reached - weights < mass))
        position = self._race(kept, token_ids)
        chosen = self._checked(token_ids.gather(-1, position).squeeze(1))
        is_cut = reached[:, -1:] < mass
        if self.has_top_k is None or width == self.logits.shape[-1]:
            is_cut = torch.zeros_like(is_cut)
        else:
            is_cut &= self.has_top_k == 0
        return chosen, is_cut.squeeze(1)

    def _race(self, weights: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the position [rows, 1] of the token that wins among `token_ids` with these weights.

        A tested token is accepted with its probability, and else leaves the race to the others: the rejection rule of
        speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318) for a draft that is certain of
        itself. Whether it is accepted is decided by noise of its own, which no token of the race has.
        """
        times = waiting_times(self.keys, token_ids)
        if self.tested is None:
            return (weights / times).argmax(dim=-1, keepdim=True)
        is_tested = token_ids == self.tested
        mass = weights.masked_fill(~is_tested, 0.0).sum(dim=-1, keepdim=True)
        level = torch.exp(-waiting_times(self.keys, token_ids.new_full((1,), -1)))  # uniform on (0, 1)
        is_accepted = level * weights.sum(dim=-1, keepdim=True) < mass
        others = (weights.masked_fill(is_tested, 0.0) / times).argmax(dim=-1, keepdim=True)
        return torch.where(is_accepted, is_tested.int().argmax(dim=-1, keepdim=True), others)

    def _select(self, rows: torch.Tensor | slice) -> "Draw":
        whole: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        selected: dict[str, Any] = {name: None if part is None else part[rows] for name, part in whole.items()}
        return Draw(**selected)

    def _weigh(self, logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities relative to the best token's, float64: 1 for the best token at any temperature."""
        return logits.double().sub_(self.peak).div_(self.temperature).exp_()

    def _drop_improbable(self, weights: torch.Tensor) -> torch.Tensor:
        return weights if self.min_p is None else weights.masked_fill(weights < self.min_p, 0.0)

    def _checked(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.masked_fill(~self.peak.isfinite().squeeze(1), INVALID)


DrawKernel: TypeAlias = Callable[[Draw], torch.Tensor]
"""A function that returns the token ids of a draw, int64 [rows], by one method for all; it tests no drafted tokens."""


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
