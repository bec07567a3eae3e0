"""engine.sampling.sampler against a straightforward reference, and its guarantees for batches, ties and edge cases."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from common.errors import EngineFault
from engine.device.devices import HostDevice
from engine.sampling.device_draw import draw_on_device
from engine.sampling.draw import waiting_times
from engine.sampling.logits import position_logprobs
from engine.sampling.sampler import Sampler
from tests.engine.sampling_reference import choice, distribution, waiting_time
from tests.engine.sampling_rows import EOS, make_logits, make_row, sample_ids

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 7.0},
    {"temperature": 1e-9},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 63},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 1500},
    {"top_k": 2**31 - 1},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 10.0},
    {"top_p": 1e-12},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"logit_bias": ((3, 4.0), (9, -100.0), (0, 2.5))},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.2},
    {"min_tokens": 500, "stop_token_ids": frozenset({4, 8})},
    {"min_tokens": 500, "stop_token_ids": frozenset({4, 8}), "ignore_eos": True},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": ((1, 3.0),)},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {
        "temperature": 1.4,
        "top_k": 300,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": ((11, 5.0),),
        "min_tokens": 500,
        "stop_token_ids": frozenset({11}),
    },
]


@pytest.mark.parametrize(
    ("params", "vocab_size"),
    [
        *((params, vocab_size) for params in PARAMS for vocab_size in (16, 1100)),
        *((params, 3000) for params in PARAMS if params.get("top_k", 0) > 1024 or "top_p" in params),
    ],
    ids=str,
)
def test_sample_with_each_parameter_equals_the_reference(params: dict[str, Any], vocab_size: int) -> None:
    logits = make_logits(12 if vocab_size == 16 else 6, vocab_size)
    rows = [
        make_row(token_index=i, output=tuple(range(3, 3 + i % 5)) + (4,) * (i % 3), seed=9, max_tokens=999, **params)
        for i in range(len(logits))
    ]
    assert sample_ids(logits, rows) == [choice(each, row, EOS) for each, row in zip(logits, rows, strict=True)]


def test_sample_in_a_mixed_batch_equals_sampling_each_row_alone() -> None:
    logits = make_logits(2 * len(PARAMS), 3000, seed=4)
    rows = [make_row(token_index=i, output=(3, 4, 4), seed=1, max_tokens=999, **p) for i, p in enumerate(PARAMS * 2)]
    alone = [sample_ids(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sample_ids(logits, rows) == alone
    order = np.random.default_rng(0).permutation(len(rows))
    assert sample_ids(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_never_changes_the_logits_it_is_given(dtype: torch.dtype) -> None:
    logits = torch.from_numpy(make_logits(len(PARAMS), 64)).to(dtype)
    before = logits.clone()
    rows = [make_row(output=(3,), max_tokens=999, **params) for params in PARAMS]
    Sampler(vocab_size=64, eos_token_ids=EOS).sample(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.3}], ids=str)
def test_filters_when_logits_tie_keep_the_smallest_token_ids(params: dict[str, Any]) -> None:
    logits = np.zeros((200, 10), dtype=np.float32)
    logits[:, ::2] = -0.0
    rows = [make_row(token_index=i, prompt=(), **params) for i in range(200)]
    assert set(sample_ids(logits, rows)) == {0, 1, 2}


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 1e-6}], ids=str)
def test_sample_when_tokens_are_impossible_never_chooses_them(params: dict[str, Any]) -> None:
    logits = np.full((300, 12), -np.inf, dtype=np.float32)
    logits[:, 3] = -1.0
    logits[:, 9] = -2.0
    rows = [make_row(token_index=i, prompt=(), **params) for i in range(300)]
    assert set(sample_ids(logits, rows)) == {3, 9}


@pytest.mark.parametrize("time", [-np.log(1 - 2**-53), -np.log(2**-53)])
def test_sample_at_the_ends_of_the_noise_chooses_a_possible_token(monkeypatch: pytest.MonkeyPatch, time: float) -> None:
    monkeypatch.setattr(
        "engine.sampling.draw.waiting_times", lambda keys, ids: torch.full((len(keys), ids.shape[-1]), time).double()
    )
    logits = make_logits(50, 200)
    logits[:, :3] = logits[:, -3:] = -np.inf
    logits[:, 3] = logits[:, -4] = -800.0  # underflows to probability 0
    for params in ({}, {"top_k": 60}, {"top_p": 0.9}, {"min_p": 0.5}):
        rows = [make_row(prompt=(), **params) for _ in range(50)]
        for token, each, row in zip(sample_ids(logits, rows), logits, rows, strict=True):
            assert distribution(each, row, EOS)[token] > 0


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_sample_when_a_logit_is_not_a_number_or_infinite_raises_engine_fault(
    params: dict[str, Any], bad: float
) -> None:
    logits = make_logits(3, 8)
    logits[1, 5] = bad
    with pytest.raises(EngineFault, match="row 1 "):
        sample_ids(logits, [make_row(prompt=(), **params)] * 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_when_every_token_is_impossible_raises_engine_fault(temperature: float) -> None:
    with pytest.raises(EngineFault, match="row 0 "):
        sample_ids(np.full((1, 8), -np.inf, dtype=np.float32), [make_row(temperature=temperature, prompt=())])


def test_logprobs_come_from_the_unshaped_logits_best_first() -> None:
    logits = make_logits(3, 50)
    rows = [
        make_row(temperature=0.0, logit_bias=((7, 100.0),), num_logprobs=4),
        make_row(temperature=0.0),
        make_row(temperature=0.0, num_logprobs=0),
    ]
    sampled = Sampler(vocab_size=50, eos_token_ids=EOS).sample(torch.from_numpy(logits), rows)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert sampled[0].token_id == 7
    assert sampled[1].logprobs is None
    first, last = sampled[0].logprobs, sampled[2].logprobs
    assert first is not None
    assert last is not None
    assert first.token_id == 7
    assert first.logprob == pytest.approx(exact[0, 7], abs=1e-5)
    best = np.argsort(-exact[0])[:4]
    assert [token for token, _ in first.top] == best.tolist()
    assert [value for _, value in first.top] == pytest.approx(exact[0, best], abs=1e-5)
    assert (last.token_id, last.top) == (int(exact[2].argmax()), ())


def test_logprobs_of_a_row_do_not_depend_on_what_its_neighbours_ask_for() -> None:
    logits = torch.from_numpy(make_logits(2, 50))
    sampler = Sampler(vocab_size=50, eos_token_ids=EOS)
    together = sampler.sample(logits, [make_row(num_logprobs=2), make_row(num_logprobs=20, seed=5)])
    assert together[0] == sampler.sample(logits[:1], [make_row(num_logprobs=2)])[0]


def test_position_logprobs_are_of_the_given_tokens_and_break_ties_by_id() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, -torch.inf, 2.0, 2.0]])
    first, second = position_logprobs(logits, [3, 1], 3)
    assert first.token_id == 3
    assert first.logprob == pytest.approx(np.log(0.25))
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert second.logprob == -np.inf
    assert [token for token, _ in second.top] == [2, 3, 0]


def test_sample_when_logits_move_by_rounding_errors_keeps_its_answers() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, size=(100, 49152)).astype(np.float32)
    moved = (logits * (1 + rng.normal(0, 1e-6, size=logits.shape))).astype(np.float32)
    rows = [make_row(token_index=i, prompt=(), temperature=0.8) for i in range(len(logits))]
    assert sample_ids(moved, rows) == sample_ids(logits, rows)


def test_waiting_times_are_splitmix64_and_exponential() -> None:
    keys = [0, 1, 2**63, 2**64 - 1]
    ids = torch.arange(5000)
    times = waiting_times(torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))[:, None], ids)
    for key, row in zip(keys, times.tolist(), strict=True):
        assert row[:50] == pytest.approx([waiting_time(key, token) for token in range(50)], rel=1e-12)
        assert stats.kstest(row, "expon").pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [16, 1100, 3000])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_draw_of_devices_chooses_the_tokens_of_the_draw_that_ranks(params: dict[str, Any], vocab_size: int) -> None:
    logits = torch.from_numpy(make_logits(40, vocab_size, scale=0.4))  # flat: nuclei of more than 1024 tokens
    logits[:, ::3] = logits[:, :1]  # and ties at their edges
    rows = [make_row(token_index=i, seed=3, max_tokens=999, **params) for i in range(len(logits))]
    ranked, drawn = (
        Sampler(vocab_size=vocab_size, eos_token_ids=EOS, draw_kernel=kernel).sample(logits, rows)
        for kernel in (None, draw_on_device)
    )
    assert drawn == ranked


def test_choose_never_looks_at_the_device() -> None:
    """The meta device has no values: reading them raises."""
    rows = [make_row(output=(3, 4), max_tokens=999, num_logprobs=i % 3 or None, **p) for i, p in enumerate(PARAMS)]
    sampler = Sampler(vocab_size=3000, eos_token_ids=EOS, draw_kernel=draw_on_device)
    chosen = sampler.choose(torch.empty(len(rows), 3000, device="meta"), rows)
    assert (chosen.token_ids.device.type, chosen.token_ids.shape) == ("meta", (len(rows),))


def test_choose_brings_its_inputs_to_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []
    send = HostDevice.send

    def count(device: HostDevice, staged: torch.Tensor, target: torch.Tensor) -> None:
        copies.append(target)
        send(device, staged, target)

    monkeypatch.setattr(HostDevice, "send", count)
    rows = [make_row(output=(3, 4), max_tokens=999, **params) for params in PARAMS]
    Sampler(vocab_size=3000, eos_token_ids=EOS).sample(torch.from_numpy(make_logits(len(rows), 3000)), rows)
    assert len(copies) == 1


@pytest.mark.parametrize("vocab_size", [128, 1024, 1000])
def test_greedy_over_a_large_vocabulary_takes_the_smallest_token_id_of_the_best(vocab_size: int) -> None:
    logits = np.random.default_rng(1).integers(0, 5, size=(300, vocab_size)).astype(np.float32)
    rows = [make_row(temperature=0.0)] * len(logits)
    assert sample_ids(logits, rows) == logits.argmax(axis=1).tolist()
