"""The race of a whole vocabulary: the kernel against its reference, and the reference against the sampler's draw."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device.columns import PackedColumns
from engine.sampling import race as kernels
from engine.sampling.device_draw import RaceColumns, race
from engine.sampling.draw import INVALID, first_best
from engine.sampling.sampler import Sampler
from tests.engine.sampling_rows import make_row


def _logits(num_rows: int, vocab_size: int) -> Tensor:
    return 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def _columns(num_rows: int, *, temperature: float, min_p: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return torch.full((num_rows,), temperature).double(), torch.full((num_rows,), min_p).double(), keys


def _all_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what rows without top-k and top-p keep."""
    return torch.full((len(logits),), -torch.inf), torch.full((len(logits),), logits.shape[1])


def _race_on(device: torch.device, *inputs: Tensor) -> list[int]:
    arguments: list[Any] = [*_on(device, *inputs), _on(device, *_all_of(inputs[0]))]
    token_ids: list[int] = kernels.race(*arguments).tolist()
    return token_ids


def _on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("vocab_size", [1, 511, 512, 513, 2049, 4100])
def test_race_of_any_vocabulary_chooses_as_reference(vocab_size: int, device: torch.device) -> None:
    logits = _logits(5, vocab_size)
    inputs = (logits, first_best(logits), *_columns(5, temperature=1.5))
    assert _race_on(device, *inputs) == race(*inputs, _all_of(logits)).tolist()


@pytest.mark.parametrize(("temperature", "min_p"), [(1e-4, 0.0), (0.7, 0.2), (10.0, 0.0), (3.0, 1.0)])
def test_race_of_temperatures_and_floors_chooses_as_reference(
    temperature: float, min_p: float, device: torch.device
) -> None:
    logits = _logits(8, 700)
    inputs = (logits, first_best(logits), *_columns(8, temperature=temperature, min_p=min_p))
    assert _race_on(device, *inputs) == race(*inputs, _all_of(logits)).tolist()


def test_race_leaves_rows_without_temperature_or_maximum_as_they_are(device: torch.device) -> None:
    logits = _logits(3, 600)
    logits[1, 7] = torch.nan
    temperature, min_p, keys = _columns(3, temperature=1.0)
    temperature[2] = 0.0
    inputs = (logits, first_best(logits), temperature, min_p, keys)
    chosen = _race_on(device, *inputs)
    assert chosen == race(*inputs, _all_of(logits)).tolist()
    assert chosen[1:] == [INVALID, int(logits[2].argmax())]


def test_race_of_impossible_tokens_never_chooses_them(device: torch.device) -> None:
    logits = torch.full((16, 1000), -torch.inf)
    logits[:, [3, 990]] = 0.0
    inputs = (logits, first_best(logits), *_columns(16, temperature=2.0))
    assert set(_race_on(device, *inputs)) == {3, 990}


def test_race_columns_choose_the_sampler_s_tokens_for_rows_that_race() -> None:
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 2**63 + 5, "min_p": 0.05},
        {"temperature": 1.0, "seed": 9, "top_k": 4},
    ]
    rows = [make_row(sample_index=i, token_index=11 + i, **params) for i, params in enumerate(sampling)]
    logits = _logits(4, 640)
    columns = PackedColumns()
    planned = RaceColumns.add(rows, 4, columns)
    words = columns.upload(torch.device("cpu"))
    chosen = planned.choose(logits, first_best(logits), words).tolist()
    expected = [each.token_id for each in Sampler(vocab_size=640, eos_token_ids=frozenset()).sample(logits, rows)]
    assert chosen == expected
