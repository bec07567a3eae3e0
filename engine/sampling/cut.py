"""The cut of top-k and top-p in one launch, without sorting: tokens above it are kept, and the first that equal it.

The cut is the k-th best logit, or the first at which the mass of the better tokens falls below top-p's. Both are found
by halving the range of the logits, whose bits order as integers, on the few tokens that can be kept: every logit is
read twice, and a third time where some tokens that equal the cut are dropped.

The rule is that of `engine.sampling.sampler`. Masses are float64, so the cuts are those of every other method unless a
share and p are within some 1e-15 of each other. Nothing depends on the order in which threads run.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program reads at once. A top-k of more has all tokens as candidates.
_LANES = 2048
_NUM_WARPS = 16

_NOTHING = tl.constexpr(-2139095041)
"""Minus infinity as an integer of `_order`."""


def cut(logits: Tensor, best_ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's last kept logit, float32 [num_rows], and the last kept id of those equal to it, int64.

    logits float32 [num_rows, vocab_size] with contiguous rows; the others [num_rows], contiguous: best_ids int64 as
    from `first_best`, temperature, top_k and top_p float64. Rows that have nothing to cut, no temperature or no best
    token keep all: their last logit is -inf.
    """
    num_rows, vocab_size = logits.shape
    last_logits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty_like(best_ids)
    room = triton.cdiv(vocab_size, _LANES) * _LANES
    candidates = torch.empty((num_rows, room), dtype=torch.float32, device=logits.device)
    _cut_kernel[(num_rows,)](
        last_logits,
        last_ids,
        candidates,
        logits,
        best_ids,
        temperature,
        top_k,
        top_p,
        logits.stride(0),
        room,
        vocab_size,
        LANES=_LANES,
        num_warps=_NUM_WARPS,
    )
    return last_logits, last_ids


# A step's columns may lie anywhere, and no step may wait for the compiler.
@triton.jit(do_not_specialize_on_alignment=["best_ids_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr"])
def _cut_kernel(
    last_logits_ptr,
    last_ids_ptr,
    candidates_ptr,
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    row_stride,
    room,
    vocab_size,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best_id = tl.load(best_ids_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocab_size)
    has_p = top_p < 1.0
    cut_key = _NOTHING
    end = vocab_size
    if (temperature > 0) & (best_id >= 0) & (has_k | has_p):
        logits_ptr += row * row_stride
        candidates_ptr += row * room
        lanes = tl.arange(0, LANES)
        best = tl.load(logits_ptr + best_id)
        peak, best_key = best.to(tl.float64), _order(best)

        # The highest logit of each lane, and the mass of all tokens.
        highs = tl.full([LANES], float("-inf"), dtype=tl.float32)
        masses = tl.zeros([LANES], dtype=tl.float64)
        for first in range(0, vocab_size, LANES):
            logits = tl.load(logits_ptr + first + lanes, mask=first + lanes < vocab_size, other=float("-inf"))
            highs = tl.maximum(highs, logits)
            if not has_k:
                masses += tl.exp((logits.to(tl.float64) - peak) / temperature)
        total = tl.sum(masses, 0)

        # A floor below which nothing is kept: k lanes reach it, or the rest weighs less than what top-p drops.
        floor_key = _NOTHING
        if has_k:
            keys = _order(highs)
            high = best_key
            while floor_key < high:
                middle = _middle(floor_key, high)
                if tl.sum((keys > middle).to(tl.int32), 0) < top_k:
                    high = middle
                else:
                    floor_key = middle + 1
        else:
            floor = peak + temperature * tl.log(0.5 * (1.0 - top_p) * total / vocab_size)
            floor_key = tl.maximum(_order(floor.to(tl.float32)) - 1, _NOTHING)  # rounding may have raised it

        # Each lane collects its own candidates, in order.
        counts = tl.zeros([LANES], dtype=tl.int32)
        for first in range(0, vocab_size, LANES):
            logits = tl.load(logits_ptr + first + lanes, mask=first + lanes < vocab_size, other=float("-inf"))
            is_candidate = (_order(logits) >= floor_key) & (logits > float("-inf"))
            tl.store(candidates_ptr + counts * LANES + lanes, logits, mask=is_candidate)
            counts += is_candidate.to(tl.int32)
        tl.debug_barrier()

        cut_key = floor_key
        num_equals = vocab_size  # of the tokens equal to the cut, how many are kept
        if has_k:
            high = best_key
            while cut_key < high:
                middle = _middle(cut_key, high)
                if _num_above(candidates_ptr, counts, middle, LANES) < top_k:
                    high = middle
                else:
                    cut_key = middle + 1
            num_equals = top_k.to(tl.int32) - _num_above(candidates_ptr, counts, cut_key, LANES)
            if has_p:
                equal = num_equals * tl.exp((_value(cut_key).to(tl.float64) - peak) / temperature)
                total = _mass_above(candidates_ptr, counts, cut_key, peak, temperature, LANES) + equal
        if has_p:
            mass = tl.maximum(top_p * total, 1e-300)  # the best token has 1
            high = best_key
            while cut_key < high:
                middle = _middle(cut_key, high)
                if _mass_above(candidates_ptr, counts, middle, peak, temperature, LANES) < mass:
                    high = middle
                else:
                    cut_key = middle + 1
            missing = mass - _mass_above(candidates_ptr, counts, cut_key, peak, temperature, LANES)
            weight = tl.exp((_value(cut_key).to(tl.float64) - peak) / temperature)
            num_equals = tl.ceil(tl.minimum(missing / tl.maximum(weight, 1e-300), 2.0**30)).to(tl.int32)

        above = _num_above(candidates_ptr, counts, cut_key, LANES)
        if _num_above(candidates_ptr, counts, cut_key - 1, LANES) - above > num_equals:
            end = _end_of_equals(logits_ptr, vocab_size, _value(cut_key), num_equals, LANES)
    tl.store(last_logits_ptr + row, _value(cut_key))
    tl.store(last_ids_ptr + row, end - 1)


@triton.jit
def _order(logits):
    """Return int32 that order as float32 do; equal for both zeros."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """Return the float32 of an integer of `_order`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Return the mean of two int32, rounded down."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _num_above(candidates_ptr, counts, key, LANES: tl.constexpr):
    """Return how many candidates are above a key."""
    found = tl.zeros([LANES], dtype=tl.int32)
    for depth in range(tl.max(counts, 0)):
        at = candidates_ptr + depth * LANES + tl.arange(0, LANES)
        logits = tl.load(at, mask=depth < counts, other=float("-inf"))
        found += (_order(logits) > key).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _mass_above(candidates_ptr, counts, key, peak, temperature, LANES: tl.constexpr):
    """Return the mass of the candidates above a key, relative to the best token's, float64."""
    masses = tl.zeros([LANES], dtype=tl.float64)
    for depth in range(tl.max(counts, 0)):
        at = candidates_ptr + depth * LANES + tl.arange(0, LANES)
        logits = tl.load(at, mask=depth < counts, other=float("-inf"))
        weights = tl.exp((logits.to(tl.float64) - peak) / temperature)
        masses += tl.where(_order(logits) > key, weights, 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _end_of_equals(logits_ptr, vocab_size, value, num_equals, LANES: tl.constexpr):
    """Return the token id behind the first `num_equals` tokens whose logits have a value."""
    lanes = tl.arange(0, LANES)
    end = vocab_size
    num_seen = tl.zeros([], dtype=tl.int32)
    for first in range(0, vocab_size, LANES):
        tokens = first + lanes
        is_equal = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("nan")) == value
        ranks = num_seen + tl.cumsum(is_equal.to(tl.int32), 0)
        end = tl.minimum(end, tl.min(tl.where(is_equal & (ranks == num_equals), tokens + 1, vocab_size), 0))
        num_seen += tl.sum(is_equal.to(tl.int32), 0)
    return end
