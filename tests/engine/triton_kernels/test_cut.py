"""Top-k and top-p by bisection: the tokens kept are those of the reference, and the race chooses the sampler's."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device.columns import PackedColumns
from engine.sampling import cut as kernels
from engine.sampling import device_draw
from engine.sampling import race as race_kernels
from engine.sampling.device_draw import RaceColumns, cut
from engine.sampling.draw import INVALID, first_best
from engine.sampling.sampler import Sampler
from tests.engine.sampling_rows import make_row

_INF = float("inf")
_WHOLE = [-3.0, -1.0, -0.0, 0.0, 1.0, 2.0, -_INF]
"""Few values, so that many are equal."""


def _kept(logits: Tensor, kept: tuple[Tensor, Tensor]) -> list[list[int]]:
    """Return each row's kept tokens that can be chosen at all."""
    last_logits, last_ids = (each.cpu().unsqueeze(1) for each in kept)
    ids = torch.arange(logits.shape[1])
    is_kept = (logits > last_logits) | ((logits == last_logits) & (ids <= last_ids))
    return [row.nonzero().flatten().tolist() for row in is_kept & logits.isfinite()]


def _both(
    logits: Tensor, params: list[tuple[float, int, float]], device: torch.device
) -> tuple[list[list[int]], list[list[int]]]:
    temperature, top_k, top_p = (torch.tensor(each, dtype=torch.float64) for each in zip(*params, strict=True))
    inputs = (logits, first_best(logits), temperature, top_k, top_p)
    found = kernels.cut(*(each.to(device) for each in inputs))
    return _kept(logits, found), _kept(logits, cut(*inputs))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tensor, list[tuple[float, int, float]]]:
    vocab_size = draw(st.integers(1, 70))
    seed = draw(st.integers(0, 2**16))
    params, rows = [], []
    for i in range(draw(st.integers(1, 3))):
        generator = torch.Generator().manual_seed(seed + i)
        if draw(st.booleans()):
            row = torch.tensor(_WHOLE)[torch.randint(len(_WHOLE), (vocab_size,), generator=generator)]
        else:
            row = 4 * torch.randn(vocab_size, generator=generator)
        rows.append(row)
        temperature = draw(st.sampled_from([0.0, 1e-3, 0.7, 1.0, 30.0]))
        top_p = draw(st.sampled_from([0.0, 1e-300, 1e-9, 0.1234, 0.9, 0.987654, 1 - 1e-9, 1.0]))
        params.append((temperature, draw(st.integers(0, vocab_size)), top_p))
    return torch.stack(rows), params


@given(case=_cases())
@settings(max_examples=40, deadline=None)
@example(case=(torch.zeros(1, 7), [(1.0, 3, 1.0)]))
@example(case=(torch.tensor([[0.0, -0.0, -_INF, 0.0]]), [(1.0, 0, 0.5)]))
@example(case=(torch.tensor([[0.0, float("nan"), 1.0], [_INF, 1.0, 0.0]]), [(1.0, 2, 0.5), (1.0, 1, 1.0)]))
@example(case=(torch.tensor([[-3e38, 3e38, 0.0]]), [(1.0, 2, 0.9)]))
def test_cut_keeps_the_tokens_of_the_reference(
    case: tuple[Tensor, list[tuple[float, int, float]]], device: torch.device
) -> None:
    found, expected = _both(*case, device)
    assert found == expected


@pytest.mark.parametrize("vocab_size", [2047, 2049, 6151])
def test_cut_of_several_parts_keeps_the_tokens_of_the_reference(vocab_size: int, device: torch.device) -> None:
    logits = 4 * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[3] = logits[3].round()  # ties across parts
    params = [(1.0, 20, 0.95), (1.0, 0, 0.9), (0.6, vocab_size - 1, 1.0), (2.0, vocab_size // 2, 0.999)]
    found, expected = _both(logits, params, device)
    assert found == expected


@pytest.mark.parametrize("values", ["distinct", "equal"])
def test_shaped_rows_are_drawn_without_a_sort_and_get_the_sampler_s_tokens(
    values: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "output_token_ids": (3, 4, 4)},
        {"logit_bias": ((7, 4.0), (11, -100.0))},
        {"structured_outputs": '{"regex": "a*"}', "allowed": np.arange(300) % 3 == 0},
        {"presence_penalty": 1.5, "output_token_ids": (9,)},
    ]
    filters: list[dict[str, Any]] = [{"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}, {"min_p": 0.05}, {"temperature": 0.0}]
    rows = []
    for i, (shape, cut_by) in enumerate(product(shapes, filters)):
        params = {"temperature": 1.4, "seed": i} | shape | cut_by
        fields = {name: params.pop(name) for name in ("output_token_ids", "allowed") if name in params}
        rows.append(replace(make_row(token_index=i, **params), **fields))
    logits = 2 * torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(2))
    if values == "equal":
        logits = logits.round()
    expected = Sampler(vocab_size=300, eos_token_ids=frozenset()).sample(logits, rows)
    monkeypatch.setattr(device_draw, "_kernels_for", lambda _device: (kernels.cut, race_kernels.race))
    monkeypatch.setattr("torch.sort", None)
    monkeypatch.setattr("torch.topk", None)
    sampler = Sampler(vocab_size=300, eos_token_ids=frozenset(), draw_kernel=device_draw.draw_on_device)
    assert sampler.sample(logits.to(device), rows) == expected


def test_rows_with_top_k_and_top_p_get_the_sampler_s_tokens(device: torch.device) -> None:
    sampling: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.9},
        {"top_k": 1},
        {"top_k": 3, "min_p": 0.3, "temperature": 5.0},
        {"temperature": 0.0, "top_k": 3},
        {"top_k": 7, "top_p": 0.5},
    ]
    rows = [make_row(sample_index=i, seed=i, **{"temperature": 1.0, **params}) for i, params in enumerate(sampling)]
    logits = 2 * torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    expected = [each.token_id for each in Sampler(vocab_size=300, eos_token_ids=frozenset()).sample(logits, rows)]
    logits[5, 9] = torch.nan
    expected[5] = INVALID
    columns = PackedColumns()
    planned = RaceColumns.add(rows, 6, columns)
    words = columns.upload(torch.device("cpu"))
    best_ids = first_best(logits)
    assert planned.choose(logits, best_ids, words).tolist() == expected
    shared: list[Any] = [each.to(device) for each in (logits, best_ids, planned.temperature.of(words))]
    limits, rest = (planned.top_k, planned.top_p), (planned.min_p, planned.keys)
    kept = kernels.cut(*shared, *(each.of(words).to(device) for each in limits))
    arguments: list[Any] = [*shared, *(each.of(words).to(device) for each in rest), kept]
    assert race_kernels.race(*arguments).tolist() == expected
