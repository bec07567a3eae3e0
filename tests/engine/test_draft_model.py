"""Drafts of a model: answers are the same with any drafter; a good one is nearly always right, a bad one is left."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from common.sampling import SamplingParams
from common.timing import StepShape
from common.tokens import as_tokens
from engine.executor import Sampled, ScheduledSequence, StepHandle, StepResult
from engine.fake import FakeExecutor
from engine.speculation import draft_model
from engine.speculation.draft_model import DifferentVocabulary, ModelDrafter
from engine.speculation.rates import TreeRates
from tests.builders import BLOCK_SIZE, assert_empty, make_core, make_request, run_until_idle, submit
from tests.engine.draft_layers import load_tiny, tiny_requests
from tests.engine.drafting import a_sequence, eager
from tests.engine.driver import load, make_sequence
from tests.engine.test_speculation_model import serve
from tests.engine.tiny_models import make_model


def fake_executor(num_blocks: int = 64) -> FakeExecutor:
    return FakeExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=128)


def test_a_draft_model_that_is_the_target_is_always_right_and_leaves_no_page_behind() -> None:
    requests = [
        make_request(range(i, i + 7), max_tokens=20, ignore_eos=True, temperature=t) for i, t in ((5, 0), (50, 1))
    ]
    plain = make_core(max_steps_in_flight=1)
    expected = [submit(plain, request)[1] for request in requests]
    run_until_idle(plain)
    drafter = ModelDrafter(fake_executor(), target=plain.executor, is_coupled=True)
    core = make_core(max_steps_in_flight=1, speculator=eager(drafter, num_tokens=3))
    found = [submit(core, request)[1] for request in requests]
    num_steps = run_until_idle(core)
    assert [each.token_ids() for each in found] == [each.token_ids() for each in expected]
    load = core.load()
    assert load.num_accepted_tokens == load.num_drafted_tokens > 20
    assert num_steps < 16
    assert_empty(core)
    assert drafter.num_used_blocks == 0


def test_a_draft_model_without_a_page_left_drafts_nothing() -> None:
    requests = [make_request(range(i, i + 30), max_tokens=8, ignore_eos=True) for i in (5, 50)]
    core = make_core(max_steps_in_flight=1)
    core.scheduler.speculator = eager(ModelDrafter(fake_executor(num_blocks=2), target=core.executor, is_coupled=True))
    collectors = [submit(core, request)[1] for request in requests]
    run_until_idle(core)
    assert all(len(each.token_ids()) == 8 for each in collectors)
    assert core.load().num_drafted_tokens == 0


def test_prompts_that_a_draft_model_reads_take_a_bounded_part_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP", 16)
    executor, sizes = fake_executor(), []
    launch = executor.launch

    def counted(batch: Sequence[ScheduledSequence]) -> StepHandle:
        sizes.append(sum(item.num_new_tokens for item in batch))
        return launch(batch)

    monkeypatch.setattr(executor, "launch", counted)
    drafter = ModelDrafter(executor, target=executor, is_coupled=True)
    wanted = {make_sequence(range(i, i + 30), block_size=BLOCK_SIZE): (1,) for i in (5, 50, 100)}
    rounds = [drafter.draft(wanted) for _ in range(8)]
    assert all(len(drafts[0]) == 1 for drafts in rounds[-1].values())
    assert max(sizes) <= 16 + len(wanted)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_penalties_of_a_draft_are_counted_anew_once_the_answer_is_another(penalty: float) -> None:
    drafter = ModelDrafter(fake_executor(), target=fake_executor(), is_coupled=True)
    sampling = SamplingParams(frequency_penalty=penalty)
    sequence = make_sequence([1, 2, 3], sampling=sampling, block_size=BLOCK_SIZE)
    (drafted,) = drafter.draft({sequence: (3,)})[sequence]
    assert len(drafted) == 3
    before = drafter._shadows[sequence]  # noqa: SLF001 - the owner of the counts
    sequence.append_token(drafted[0] + 1)
    behind = drafter._shadow(sequence)  # noqa: SLF001
    assert behind.token_ids == sequence.token_ids
    assert (behind is before) == (penalty == 0.0)
    drafter.forget(sequence)
    assert drafter.num_used_blocks == 0


def test_a_draft_model_with_other_tokens_is_refused() -> None:
    other = fake_executor()
    other.vocab_size += 1
    with pytest.raises(DifferentVocabulary, match="same vocabulary"):
        ModelDrafter(other, target=fake_executor(), is_coupled=True)


def test_under_the_rejection_rule_the_draft_is_drawn_with_noise_of_its_own() -> None:
    sequence = make_sequence([1, 2, 3], sampling=SamplingParams(temperature=1.0, seed=3), block_size=BLOCK_SIZE)
    seeds = {}
    for is_coupled in (True, False):
        drafter = ModelDrafter(fake_executor(), target=fake_executor(), is_coupled=is_coupled)
        seeds[is_coupled] = drafter._request(sequence.request).sampling.seed  # noqa: SLF001 - what must differ
    assert seeds[True] == 3
    assert seeds[False] != 3


def test_a_draft_model_that_is_always_wrong_is_left_but_for_a_trial_now_and_then() -> None:
    rates, sequence = TreeRates([0.6] * 4, [0.1], num_branches=0, trial_steps=100), a_sequence()
    refused = StepResult(sampled=[Sampled(token_id=9)], prompt_logprobs=[])
    for _ in range(30):
        rates.prospects(sequence, 4)
        rates.observe(ScheduledSequence(sequence, 5, 1, draft=as_tokens([1, 2, 3, 4])), refused)
    assert rates.prospects(sequence, 4)[0][0] < 0.2
    for _ in range(101):
        rates.count_step()
    assert rates.prospects(sequence, 4) == [[pytest.approx(0.99)]]
    rates.observe(ScheduledSequence(sequence, 2, 1, draft=as_tokens([1])), refused)
    assert rates.prospects(sequence, 4)[0][0] < 0.2


def test_drafting_that_takes_as_long_as_a_step_is_not_worth_it() -> None:
    drafter = ModelDrafter(fake_executor(), target=fake_executor(), is_coupled=True)
    assert drafter.costs_s(1, 4) is None
    for _ in range(9):
        drafter._costs.observe(StepShape(num_decodes=1), 2.0)  # noqa: SLF001 - as if its steps had taken so long
    assert drafter.costs_s(1, 4) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_answers_of_every_kind_are_those_without_a_draft_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        make_model("llama", seed=seed, **sizes).save_pretrained(folder)
    executor = load_tiny(folders[0], block_size=16)
    plain, _ = serve(executor, tiny_requests(), None)
    for folder, is_right in zip(folders, (True, False), strict=True):
        drafter = ModelDrafter(load(folder, block_size=16), target=executor, is_coupled=True, num_branches=1)
        speculated, core = serve(executor, tiny_requests(), eager(drafter, num_tokens=4))
        assert speculated == plain
        assert drafter.num_used_blocks == 0
        done = core.load()
        assert done.num_drafted_tokens > 0
        assert (done.num_accepted_tokens > 0.9 * done.num_drafted_tokens) == is_right
