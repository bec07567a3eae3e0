"""Top-k and top-p without a sort, in two launches: each row's last kept token, found by narrowing a range of logits.

The kept tokens are the first ones of the order that `engine.sampling.sampler` documents, larger logits first and of
equals the smaller ids: exactly k of them, and no more than reach the mass p. One kernel takes the largest logit and the
mass of each part of a row's vocabulary. The second one, a program for each row, narrows the last kept token's logit
down to one float32, a factor of four a round, and reads only the parts with a logit in or above the range that is left.
Then it counts the equal logits to keep. Masses are float64 sums in a fixed order, so that a mass never falls when
tokens join. Against a sorted sum, only a near tie with p, of 2**-50 of the mass, can change.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a part.
_PART = 2048

_LOWEST = tl.constexpr(-2139095041)
"""`_ordered` of -inf."""


def cut(logits: Tensor, best_ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's last kept logit, float32 [num_rows], and the last kept id of those equal to it, int64.

    logits float32 [num_rows, vocab_size] with contiguous rows; the others [num_rows], contiguous: best_ids int64 as
    from `first_best`, temperature, top_k and top_p float64. Rows that have nothing to cut, no temperature or no best
    token keep all: their last logit is -inf.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    peaks = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    masses = torch.empty((num_rows, num_parts), dtype=torch.float64, device=logits.device)
    last_logits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty_like(best_ids)
    columns = (logits, best_ids, temperature, top_k, top_p, logits.stride(0), vocab_size)
    _parts_kernel[(num_rows, num_parts)](peaks, masses, *columns, PART=_PART, num_warps=4)
    _cut_kernel[(num_rows,)](
        last_logits,
        last_ids,
        peaks,
        masses,
        *columns,
        num_parts,
        PART=_PART,
        NUM_PARTS=triton.next_power_of_2(num_parts),
        num_warps=16,
    )
    return last_logits, last_ids


# A step's columns may lie anywhere, and no step may wait for the compiler.
_ANYWHERE = ["best_ids_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr"]


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _parts_kernel(
    peaks_ptr,
    masses_ptr,
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    row_stride,
    vocab_size,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best_id = tl.load(best_ids_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    is_cut = ((top_k > 0) & (top_k < vocab_size)) | (tl.load(top_p_ptr + row) < 1)
    if (temperature > 0) & (best_id >= 0) & is_cut:
        row_ptr = logits_ptr + row * row_stride
        peak = tl.load(row_ptr + best_id).to(tl.float64)
        logits = _load_part(row_ptr, tl.program_id(1), vocab_size, PART)
        at = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(peaks_ptr + at, tl.max(_ordered(logits), 0))
        tl.store(masses_ptr + at, tl.sum(tl.exp((logits.to(tl.float64) - peak) / temperature), 0))


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=_ANYWHERE)
def _cut_kernel(
    last_logits_ptr,
    last_ids_ptr,
    peaks_ptr,
    masses_ptr,
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    row_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best_id = tl.load(best_ids_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    last = tl.full([], _LOWEST, tl.int32)
    last_id = tl.full([], 0, tl.int64) + vocab_size
    if (temperature > 0) & (best_id >= 0) & (has_top_k | (top_p < 1)):
        row_ptr = logits_ptr + row * row_stride
        peaks_ptr += row * num_parts
        peak = tl.load(row_ptr + best_id)
        parts = tl.arange(0, NUM_PARTS)
        total = tl.sum(tl.load(masses_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0), 0)
        highest = _ordered(peak)
        wide_peak = peak.to(tl.float64)
        num_kept = tl.full([], 0.0, tl.float64) + vocab_size
        num_equal = num_kept
        if has_top_k:
            last = _search(
                top_k,
                last,
                highest,
                row_ptr,
                peaks_ptr,
                wide_peak,
                temperature,
                vocab_size,
                num_parts,
                PART,
                BY_MASS=False,
            )
            num_above, above, num_equal = _measure(
                last, row_ptr, peaks_ptr, wide_peak, temperature, vocab_size, num_parts, PART
            )
            num_kept = top_k - num_above
            total = above + num_kept * tl.exp((_value(last).to(tl.float64) - wide_peak) / temperature)
        if top_p < 1:
            target = tl.maximum(top_p * total, 1e-300)  # the best token has 1
            # Tokens that are lighter than this cannot together have the mass that top-p leaves out.
            lightest = wide_peak + temperature * tl.log((total - target) / vocab_size) - 1.0
            lowest = tl.maximum(last, tl.where(lightest > -3e38, _ordered(lightest.to(tl.float32)), _LOWEST))
            lowest = tl.minimum(lowest, highest)
            found = _search(
                target,
                lowest,
                highest,
                row_ptr,
                peaks_ptr,
                wide_peak,
                temperature,
                vocab_size,
                num_parts,
                PART,
                BY_MASS=True,
            )
            _, above, num_found = _measure(
                found, row_ptr, peaks_ptr, wide_peak, temperature, vocab_size, num_parts, PART
            )
            weight = tl.exp((_value(found).to(tl.float64) - wide_peak) / temperature)
            num_needed = tl.where(weight > 0, tl.ceil((target - above) / weight), num_found)
            num_needed = tl.minimum(tl.maximum(num_needed, 1.0), num_found)
            num_kept = tl.where(found > last, num_needed, tl.minimum(num_kept, num_needed))
            num_equal = num_found
            last = found
        if num_kept < num_equal:
            last_id = _find_equal(last, num_kept, row_ptr, peaks_ptr, vocab_size, num_parts, PART)
    tl.store(last_logits_ptr + row, _value(last))
    tl.store(last_ids_ptr + row, last_id)


@triton.jit
def _search(
    target,
    low,
    high,
    row_ptr,
    peaks_ptr,
    peak,
    temperature,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Return the largest ordered logit in low..high at or above which there are `target` tokens, or is that mass.

    `low` is known to suffice.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = (high - low + 3) // 4
        first = (low + step).to(tl.int32)
        second = (low + 2 * step).to(tl.int32)
        third = (low + 3 * step).to(tl.int32)
        over_first = tl.zeros([PART], dtype=tl.float64)
        over_second = tl.zeros([PART], dtype=tl.float64)
        over_third = tl.zeros([PART], dtype=tl.float64)
        for part in range(num_parts):
            if tl.load(peaks_ptr + part) >= first:
                logits = _load_part(row_ptr, part, vocab_size, PART)
                ordered = _ordered(logits)
                if BY_MASS:
                    weights = tl.exp((logits.to(tl.float64) - peak) / temperature)
                else:
                    weights = tl.full([PART], 1.0, tl.float64)
                over_first += tl.where(ordered >= first, weights, 0.0)
                over_second += tl.where(ordered >= second, weights, 0.0)
                over_third += tl.where(ordered >= third, weights, 0.0)
        if tl.sum(over_third, 0) >= target:
            low = third.to(tl.int64)
        elif tl.sum(over_second, 0) >= target:
            low = second.to(tl.int64)
            high = tl.minimum(high, third.to(tl.int64) - 1)
        elif tl.sum(over_first, 0) >= target:
            low = first.to(tl.int64)
            high = tl.minimum(high, second.to(tl.int64) - 1)
        else:
            high = first.to(tl.int64) - 1
    return low.to(tl.int32)


@triton.jit
def _measure(bound, row_ptr, peaks_ptr, peak, temperature, vocab_size, num_parts, PART: tl.constexpr):
    """Return the number of tokens above an ordered logit, their mass, and the number of those equal to it, float64."""
    num_above = tl.zeros([PART], dtype=tl.float64)
    above = tl.zeros([PART], dtype=tl.float64)
    num_equal = tl.zeros([PART], dtype=tl.float64)
    for part in range(num_parts):
        if tl.load(peaks_ptr + part) >= bound:
            logits = _load_part(row_ptr, part, vocab_size, PART)
            exists = part * PART + tl.arange(0, PART) < vocab_size
            ordered = _ordered(logits)
            weights = tl.exp((logits.to(tl.float64) - peak) / temperature)
            above += tl.where(ordered > bound, weights, 0.0)
            num_above += tl.where(ordered > bound, 1.0, 0.0)
            num_equal += tl.where(exists & (ordered == bound), 1.0, 0.0)
    return tl.sum(num_above, 0), tl.sum(above, 0), tl.sum(num_equal, 0)


@triton.jit
def _find_equal(bound, number, row_ptr, peaks_ptr, vocab_size, num_parts, PART: tl.constexpr):
    """Return the id, int64, of the `number`-th token, counted from one, that equals an ordered logit."""
    token_id = tl.full([], 0, tl.int64) + vocab_size
    num_before = tl.full([], 0, tl.int32)
    wanted = number.to(tl.int32)
    for part in range(num_parts):
        if (num_before < wanted) & (tl.load(peaks_ptr + part) >= bound):
            tokens = part * PART + tl.arange(0, PART)
            is_equal = _ordered(_load_part(row_ptr, part, vocab_size, PART)) == bound
            place = num_before + tl.cumsum(is_equal.to(tl.int32), 0)
            found = tl.min(tl.where(is_equal & (place == wanted), tokens, vocab_size), 0)
            token_id = tl.minimum(token_id, found.to(tl.int64))
            num_before += tl.sum(is_equal.to(tl.int32), 0)
    return token_id


@triton.jit
def _load_part(row_ptr, part, vocab_size, PART: tl.constexpr):
    """Return a part's logits, float32 [PART]; -inf beyond the vocabulary."""
    tokens = part * PART + tl.arange(0, PART)
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))


@triton.jit
def _ordered(logits):
    """Return int32 numbers that are ordered as float32 logits are; 0.0 and -0.0 are equal."""
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(ordered):
    """Return the logit, float32, of a number of `_ordered`."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
