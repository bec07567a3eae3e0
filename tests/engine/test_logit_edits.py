"""Edits of logits that requests ask for: forbidden tokens, biases, and penalties for tokens that are already there."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.device.columns import PackedColumns
from engine.sampling.logits import LogitEdits, SamplingRow
from engine.sampling.sampler import Sampler
from engine.sequence import OutputTokens
from engine.sequence import Sequence as EngineSequence
from tests.engine.driver import make_sequence
from tests.engine.sampling_rows import EOS, make_logits, make_row, sample_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "params", "token_index", "expected"),
    [
        ([10.0, -30.0, 50.0, -30.0], {"min_tokens": 3}, 2, 0),
        ([10.0, -30.0, 50.0, -30.0], {"min_tokens": 3, "ignore_eos": True}, 2, 2),
        ([10.0, -30.0, 50.0, -30.0], {"min_tokens": 3}, 3, 2),
        ([10.0, -30.0, 50.0, -30.0], {"min_tokens": 3, "ignore_eos": True}, 3, 2),
        ([0.0, 50.0, 1.0, 90.0], {"min_tokens": 1, "ignore_eos": True, "stop_token_ids": frozenset({3})}, 0, 1),
        ([0.0, 50.0, 1.0, 90.0], {"min_tokens": 1, "ignore_eos": True, "stop_token_ids": frozenset({3})}, 1, 3),
    ],
)
def test_min_tokens_forbids_stop_tokens_and_eos_unless_eos_is_ignored(
    logits: list[float], params: dict[str, Any], token_index: int, expected: int, temperature: float
) -> None:
    row = make_row(token_index=token_index, prompt=(), output=(1,) * token_index, temperature=temperature, **params)
    assert sample_ids(np.array([logits], dtype=np.float32), [row]) == [expected]


class CountingTuple(tuple[tuple[int, float], ...]):
    """Counts the iterations over it."""

    num_passes = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        type(self).num_passes += 1
        return super().__iter__()


def test_samples_of_one_request_share_the_packing_of_logit_bias_and_stop_tokens() -> None:
    CountingTuple.num_passes = 0
    rng = np.random.default_rng(0)
    bias = CountingTuple((token, float(value)) for token, value in enumerate(rng.normal(size=40)))
    stops = frozenset(range(0, 40, 7))
    shared = make_row(logit_bias=bias, stop_token_ids=stops, min_tokens=3)
    others = [make_row(), make_row(logit_bias=((1, 2.5),)), make_row(stop_token_ids=stops, min_tokens=3)]
    rows = [shared, others[0], *[dataclasses.replace(shared, sample_index=i) for i in range(1, 9)], *others[1:]]
    columns = PackedColumns()
    edits = LogitEdits.plan(rows, EOS, columns)
    assert CountingTuple.num_passes <= 1
    assert edits is not None
    logits = torch.zeros(len(rows), 50)
    edits.apply(logits, columns.upload(logits.device))
    for row, shaped in zip(rows, logits.tolist(), strict=True):
        expected = np.zeros(50, dtype=np.float32)
        for token, value in tuple.__iter__(row.params.logit_bias):
            expected[token] += np.float32(value)
        if row.params.min_tokens:
            expected[[*stops, *EOS]] = -np.inf
        assert shaped == expected.tolist()


def generated(prompt: list[int], output: list[int]) -> EngineSequence:
    sequence = make_sequence(prompt)
    for token_id in output:
        sequence.append_token(token_id)
    return sequence


def sequence_row(sequence: EngineSequence, **params: Any) -> SamplingRow:
    return dataclasses.replace(
        make_row(token_index=sequence.num_output_tokens, max_tokens=999, **params),
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=OutputTokens(sequence),
        owner=sequence,
    )


def test_penalties_of_sequences_that_come_and_go_equal_those_counted_anew() -> None:
    """Forty sequences, up to fifteen per step, so that counts change owners and grow; some steps are only planned."""
    rng = random.Random(0)
    vocab_size = 30
    kept = Sampler(vocab_size=vocab_size, eos_token_ids=EOS)
    sequences = [generated(rng.choices(range(30), k=rng.randrange(1, 9)), []) for _ in range(40)]
    kinds = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {}]
    for step in range(120):
        batch = rng.sample(sequences, rng.randrange(1, 4 + step // 10))
        rows = [sequence_row(sequence, seed=i, **kinds[i % 3]) for i, sequence in enumerate(batch)]
        if step % 7 == 0:
            kept.plan(rows, PackedColumns())  # and never launched
            continue
        logits = make_logits(len(rows), vocab_size, seed=step)
        found = [sampled.token_id for sampled in kept.sample(torch.from_numpy(logits), rows)]
        afresh = [dataclasses.replace(row, owner=None, output_token_ids=list(row.output_token_ids)) for row in rows]
        assert found == sample_ids(logits, afresh)
        for sequence, token_id in zip(batch, found, strict=True):
            sequence.append_token(token_id)


def test_penalties_in_later_steps_bring_only_new_tokens_to_the_device() -> None:
    sampler = Sampler(vocab_size=50, eos_token_ids=EOS)
    sequence = generated([3] * 5000, [4] * 3000)
    num_words = []
    for _ in range(3):
        columns = PackedColumns()
        plan = sampler.plan([sequence_row(sequence, repetition_penalty=1.2)], columns)
        num_words.append(columns.num_words)
        plan.choose(torch.from_numpy(make_logits(1, 50)), columns.upload(torch.device("cpu")))
        sequence.append_token(7)
    assert num_words[0] > 8000
    assert num_words[1:] == [num_words[1]] * 2
    assert num_words[1] < 30
