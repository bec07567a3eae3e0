"""The random choice among the tokens that top-k and top-p keep, in two launches: as `engine.sampling.device_draw.race`.

A program races a part of a row's vocabulary, a second kernel takes the winner of each row's parts. Every logit is read
once and nothing of the vocabulary's length is written. Keys, bits and uniform numbers are those of
`engine.sampling.draw.waiting_times`, bit for bit; exponentials and logarithms are float64, within two units in the last
place of another device's. So the same logits give the same token unless the two best are nearer than 2**-50 of each
other.
"""
# ruff: noqa: ANN001, ANN202, PLR0913 - a kernel's parameters are pointers, strides and compile-time constants
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a program, and of one round of it: at batch 1 a large vocabulary is a program for each multiprocessor or so.
_PART = 2048
_BLOCK = 512

# SplitMix64, as in engine.sampling.draw.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NO_TOKEN = tl.constexpr(2**31 - 1)


def race(
    logits: Tensor, best_ids: Tensor, temperature: Tensor, min_p: Tensor, keys: Tensor, kept: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the tokens that win, int64 [num_rows]; those of `best_ids` where these are negative or temperature is 0.

    logits float32 [num_rows, vocab_size] with contiguous rows; the others [num_rows], contiguous: best_ids int64 as
    from `first_best`, temperature and min_p float64, keys int64, and the two of `kept` as `engine.sampling.cut` returns
    them.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    speeds = torch.empty((num_rows, num_parts), dtype=torch.float64, device=logits.device)
    winners = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    token_ids = torch.empty_like(best_ids)
    _race_kernel[(num_rows, num_parts)](
        speeds,
        winners,
        logits,
        best_ids,
        temperature,
        min_p,
        keys,
        *kept,
        logits.stride(0),
        vocab_size,
        PART=_PART,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    _finish_kernel[(num_rows,)](
        token_ids,
        speeds,
        winners,
        best_ids,
        temperature,
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return token_ids


# A step's columns may lie anywhere, and no step may wait for the compiler.
@triton.jit(
    do_not_specialize_on_alignment=[
        "best_ids_ptr",
        "temperature_ptr",
        "min_p_ptr",
        "keys_ptr",
        "last_logits_ptr",
        "last_ids_ptr",
    ]
)
def _race_kernel(
    speeds_ptr,
    winners_ptr,
    logits_ptr,
    best_ids_ptr,
    temperature_ptr,
    min_p_ptr,
    keys_ptr,
    last_logits_ptr,
    last_ids_ptr,
    row_stride,
    vocab_size,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    best_id = tl.load(best_ids_ptr + row)
    if (temperature > 0) & (best_id >= 0):
        row_ptr = logits_ptr + row * row_stride
        peak = tl.load(row_ptr + best_id).to(tl.float64)
        min_p = tl.load(min_p_ptr + row)
        key = tl.load(keys_ptr + row)
        last_logit = tl.load(last_logits_ptr + row)
        last_id = tl.load(last_ids_ptr + row)
        lanes = tl.arange(0, BLOCK)
        speeds = tl.full([BLOCK], -1.0, dtype=tl.float64)
        winners = tl.full([BLOCK], _NO_TOKEN, dtype=tl.int32)
        for first in range(0, PART, BLOCK):
            tokens = tl.program_id(1) * PART + first + lanes
            exists = tokens < vocab_size
            logits = tl.load(row_ptr + tokens, mask=exists, other=float("-inf"))
            is_kept = (logits > last_logit) | ((logits == last_logit) & (tokens <= last_id))
            weights = tl.exp((logits.to(tl.float64) - peak) / temperature)
            weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
            speed = tl.where(exists, weights / _waiting_times(key, tokens), -1.0)
            is_faster = speed > speeds  # of equals, the smaller token id stays
            winners = tl.where(is_faster, tokens, winners)
            speeds = tl.where(is_faster, speed, speeds)
        fastest = tl.max(speeds, 0)
        at = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(speeds_ptr + at, fastest)
        tl.store(winners_ptr + at, tl.min(tl.where(speeds == fastest, winners, _NO_TOKEN), 0))


@triton.jit
def _waiting_times(key, tokens):
    """Return the exponential times of int32 tokens, float64 > 0: see `engine.sampling.draw.waiting_times`."""
    zeros = tl.zeros_like(tokens).to(tl.uint64)
    bits = (zeros + key.to(tl.uint64, bitcast=True)) + (tokens + 1).to(tl.uint64) * (zeros + _GAMMA)
    bits = (bits ^ (bits >> 30)) * (zeros + _MIX_1)
    bits = (bits ^ (bits >> 27)) * (zeros + _MIX_2)
    bits = (bits ^ (bits >> 31)) >> 12
    return -tl.log((bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["best_ids_ptr", "temperature_ptr"])
def _finish_kernel(
    token_ids_ptr, speeds_ptr, winners_ptr, best_ids_ptr, temperature_ptr, num_parts, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(best_ids_ptr + row)
    if (tl.load(temperature_ptr + row) > 0) & (token_id >= 0):
        parts = tl.arange(0, BLOCK)
        exists = parts < num_parts
        speeds = tl.load(speeds_ptr + row * num_parts + parts, mask=exists, other=-1.0)
        winners = tl.load(winners_ptr + row * num_parts + parts, mask=exists, other=_NO_TOKEN)
        fastest = tl.max(speeds, 0)
        token_id = tl.min(tl.where(speeds == fastest, winners, _NO_TOKEN), 0).to(tl.int64)
    tl.store(token_ids_ptr + row, token_id)
