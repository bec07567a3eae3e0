"""Invariants 2 to 4 of the design hold through crashes, delays, duplicates and losses."""

import pytest

from common.sampling import SamplingParams
from common.tokens import as_tokens
from common.wire import pack_tokens
from engine.events import FinishReason
from kvrelay.v1 import inference_pb2, sampling_pb2
from measure.simulate.chaos import ChaosSettings, run_chaos
from measure.simulate.invariants import AnswerCheck, Question, Violation
from measure.simulate.wire import FaultRates

BAD_WEEK = FaultRates(lose=0.01, repeat=0.01, delay=0.1, max_delay_s=1.0, stall=0.001, stall_s=6.0)


@pytest.mark.parametrize(
    ("settings", "num_complete"),
    [
        (ChaosSettings(num_requests=700, seed=11), 600),
        (ChaosSettings(num_requests=700, seed=12), 600),
        (ChaosSettings(num_requests=300, seed=3, rates=BAD_WEEK, mean_s_between_crashes=4.0), 150),
    ],
    ids=["seed 11", "seed 12", "many bad messages"],
)
def test_chaos_breaks_no_invariant(settings: ChaosSettings, num_complete: int) -> None:
    report = run_chaos(settings)

    assert report.violations == []
    assert report.outcomes.total() == settings.num_requests
    assert report.outcomes["complete"] > num_complete
    assert min(report.num_crashes, report.num_messages_lost, report.num_messages_repeated, report.num_replans) > 0


def test_chaos_on_aggregated_workers_without_bad_messages_completes_everything() -> None:
    calm = ChaosSettings(
        num_requests=200, seed=4, num_prefill=0, num_decode=2, rates=FaultRates(), cancelled_share=0.0,
        mean_s_between_crashes=1e9,
    )  # fmt: skip
    report = run_chaos(calm)

    assert report.violations == []
    assert report.outcomes == {"complete": 200}


def test_chaos_with_the_same_seed_is_the_same_walk() -> None:
    first, second = (run_chaos(ChaosSettings(num_requests=150, seed=5)) for _ in range(2))
    assert first == second


QUESTION = Question(
    prompt=as_tokens([1]),
    sampling=SamplingParams(max_tokens=3),
    answers=((7, 8, 9),),
    reasons=(FinishReason.LENGTH,),
)


def message(first_index: int, *token_ids: int, ends: bool = False) -> inference_pb2.GenerateResponse:
    run = sampling_pb2.TokenRun(
        first_token_index=first_index,
        tokens=pack_tokens(token_ids),
        finish_reason=sampling_pb2.FINISH_REASON_LENGTH if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )
    return inference_pb2.GenerateResponse(tokens=inference_pb2.TokenDelta(runs=[run]))


COMPLETED = inference_pb2.GenerateResponse(completed=inference_pb2.Completed())


def test_answer_check_accepts_the_answer_in_parts() -> None:
    check = AnswerCheck(QUESTION)
    for part in (message(0, 7), message(1, 8, 9, ends=True), COMPLETED):
        check.take(part)
    check.end_well()


@pytest.mark.parametrize(
    "messages",
    [
        [message(0, 7), message(0, 7)],
        [message(0, 7), message(2, 9)],
        [message(0, 7, 9)],
        [message(0, 7, ends=True)],
        [message(0, 7), COMPLETED],
        [message(0, 7, 8, 9, ends=True), COMPLETED, message(3, 1)],
    ],
    ids=["twice", "a hole", "another token", "too short", "completed too early", "behind the end"],
)
def test_answer_check_when_an_answer_is_not_right_raises(messages: list[inference_pb2.GenerateResponse]) -> None:
    check = AnswerCheck(QUESTION)
    with pytest.raises(Violation):
        for each in messages:
            check.take(each)


def test_answer_check_when_the_end_does_not_fit_raises() -> None:
    with pytest.raises(Violation):
        AnswerCheck(QUESTION).end_well()
    check = AnswerCheck(QUESTION)
    for part in (message(0, 7, 8, 9, ends=True), COMPLETED):
        check.take(part)
    with pytest.raises(Violation):
        check.end_badly()
