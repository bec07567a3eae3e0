"""The choice on a device: it reads no memory of the host meanwhile, and a grammar's mask is packed in bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.device.columns import PackedColumns
from engine.sampling.device_draw import draw_on_device
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler
from tests.engine.sampling_rows import EOS, make_logits, make_row, sample_ids

STRUCTURE = '{"regex": "a*"}'


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails operations on tensors of the host, from which a GPU's would be copied, and those that wait for a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        assert all(each.device.type == "meta" or not each.ndim for each in tensors), f"{func} reads the host's memory"
        return func(*args, **(kwargs or {}))


def structured(mask: np.ndarray[Any, np.dtype[np.bool_]], **params: Any) -> SamplingRow:
    row = make_row(structured_outputs=STRUCTURE, **params)
    row.allowed = mask
    return row


def pending(**params: Any) -> SamplingRow:
    row = make_row(**params)
    row.pending_row = 1
    return row


ROWS: dict[str, list[SamplingRow]] = {
    "plain": [make_row(temperature=0.0), make_row()],
    "ranked": [make_row(top_k=5), make_row(top_p=0.7, num_logprobs=3), make_row(min_p=0.1)],
    "edited": [make_row(logit_bias=((3, 4.0),)), make_row(min_tokens=3)],
    "penalised": [make_row(repetition_penalty=1.4), make_row(presence_penalty=0.9, output=(3, 4)), make_row()],
    "pending": [pending(frequency_penalty=0.4, token_index=1), make_row(frequency_penalty=0.4)],
    "structured": [structured(np.arange(70) % 3 == 0)],
    "among others": [make_row(top_p=0.5), structured(np.arange(70) % 3 == 0, top_k=9), make_row(temperature=0.0)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_choice_on_a_device_reads_no_memory_of_the_host(rows: list[SamplingRow]) -> None:
    sampler = Sampler(vocab_size=70, eos_token_ids=EOS, draw_kernel=draw_on_device)
    columns = PackedColumns()
    plan = sampler.plan(rows, columns)
    words = torch.empty(columns.num_words, dtype=torch.int64, device="meta")
    with HostReads():  # type: ignore[no-untyped-call]
        last_sampled = torch.empty(8, dtype=torch.int64, device="meta")
        chosen = plan.choose(torch.empty((len(rows), 70), device="meta"), words, last_sampled=last_sampled)
    assert chosen.token_ids.shape == (len(rows),)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("num_others", [0, 2])
def test_grammar_allows_its_tokens_alone_whatever_the_size_of_the_vocabulary(vocab_size: int, num_others: int) -> None:
    logits = make_logits(4 + num_others, vocab_size)
    masks = np.random.default_rng(1).random((4, vocab_size)) < 0.3
    masks[:, -1] |= ~masks.any(axis=1)
    others = [make_row(temperature=0.0, sample_index=i) for i in range(num_others)]
    rows = [structured(mask, temperature=4.0, sample_index=i) for i, mask in enumerate(masks)]
    forbidden = np.concatenate([np.where(masks, logits[:4], -np.inf), logits[4:]]).astype(np.float32)
    expected = sample_ids(forbidden, [make_row(temperature=4.0, sample_index=i) for i in range(4)] + others)
    assert sample_ids(logits, rows + others) == expected
