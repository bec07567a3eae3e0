"""The rejection rule of speculative sampling: whatever is drafted, answers have the model's distribution."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.executor import ScheduledSequence
from engine.request import EngineRequest
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler, sampling_rows
from engine.sequence import Sequence as EngineSequence
from engine.speculation.ngram import NgramDrafter
from engine.steps.speculator import Rule, Speculator
from tests.builders import make_request
from tests.engine.driver import make_sequence
from tests.engine.sampling_reference import distribution
from tests.engine.sampling_rows import make_row

NUM_SEEDS = 2000
UNLIKELY = 1e-3
"""Level of the tests. Seeds are fixed: a test that passes always does."""
SAMPLER = Sampler(vocab_size=6, eos_token_ids=frozenset({5}))
LOGITS = np.array([0.3, 1.4, -0.7, 0.9, 0.0, -1.5], dtype=np.float32)


def assert_distributed(counts: Counter[Any], expected: dict[Any, float]) -> None:
    """The counts pass a chi-squared test, and nothing impossible was drawn."""
    assert not [drawn for drawn in counts if not expected.get(drawn)]
    cells = [cell for cell, probability in expected.items() if probability]
    total, scale = sum(counts.values()), sum(expected.values())
    found = stats.chisquare([counts[cell] for cell in cells], [expected[cell] * total / scale for cell in cells])
    assert found.pvalue > UNLIKELY


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_token_behind_any_draft_has_the_distribution_of_one_without(params: dict[str, Any]) -> None:
    logits = torch.from_numpy(LOGITS).expand(NUM_SEEDS, -1)
    expected = dict(enumerate(distribution(LOGITS, make_row(prompt=(), **params), frozenset()).tolist()))
    for tested in range(len(LOGITS)):
        rows = [make_row(seed=seed, token_index=tested, tested=tested, **params) for seed in range(NUM_SEEDS)]
        assert_distributed(Counter(each.token_id for each in SAMPLER.sample(logits, rows)), expected)


def test_answers_by_drafts_that_know_nothing_are_distributed_as_those_of_the_model() -> None:
    vocab, length, num_drafted = 3, 3, 2
    sampler = Sampler(vocab_size=vocab, eos_token_ids=frozenset())
    chain = np.random.default_rng(4).normal(size=(vocab, vocab)).astype(np.float32)  # logits by the token before
    chances = torch.softmax(torch.from_numpy(chain), dim=-1).numpy()
    answers: list[list[int]] = [[0] for _ in range(NUM_SEEDS)]
    while unfinished := [seed for seed in range(NUM_SEEDS) if len(answers[seed]) <= length]:
        rows: list[SamplingRow] = []
        before: list[int] = []
        drafts = {}
        for seed in unfinished:
            last, place = answers[seed][-1], len(answers[seed])
            draft = drafts[seed] = [(last + place) % vocab, (seed + place) % vocab]
            rows += [make_row(seed=seed, token_index=place + i, tested=token) for i, token in enumerate([*draft, -1])]
            before += [last, *draft]
        sampled = [each.token_id for each in sampler.sample(torch.from_numpy(chain[before]), rows)]
        for i, seed in enumerate(unfinished):
            drawn = sampled[i * (num_drafted + 1) : (i + 1) * (num_drafted + 1)]
            num_accepted = next((j for j, token in enumerate(drafts[seed]) if token != drawn[j]), num_drafted)
            answers[seed] += drawn[: num_accepted + 1]
    expected = {
        (a, b, c): float(chances[0, a] * chances[a, b] * chances[b, c]) for a, b, c in product(range(vocab), repeat=3)
    }
    assert_distributed(Counter(tuple(answer[1 : 1 + length]) for answer in answers), expected)


def scheduled(draft: Sequence[int], *, rejects: bool) -> ScheduledSequence:
    sequence = make_sequence([1, 2, 3], sampling=SamplingParams(temperature=1.0), block_size=16)
    sequence.num_computed = 2
    return ScheduledSequence(sequence, 1 + len(draft), 1, draft=as_tokens(draft), rejects=rejects)


def test_rows_of_a_draft_test_the_token_that_stands_behind_them() -> None:
    assert [row.tested for row in sampling_rows(scheduled([4, 0], rejects=True))] == [4, 0, -1]
    assert [row.tested for row in sampling_rows(scheduled([4, 0], rejects=False))] == [-1, -1, -1]


def test_answers_that_must_come_again_as_they_were_are_coupled_under_any_rule() -> None:
    speculator = Speculator(NgramDrafter(), num_tokens=2, rule=Rule.REJECTION)

    def rejects(request: EngineRequest) -> bool:
        return speculator.rejects(EngineSequence.from_request(request, block_size=16, order=0))

    sampled = make_request([1], temperature=1.0)
    assert rejects(sampled)
    assert not rejects(make_request([1], temperature=0.0))
    assert not rejects(replace(sampled, must_repeat=True))
