"""Invariants 2 to 4 of the design hold through any faults, and when these end, everything is served soon."""

import random
from dataclasses import replace
from typing import Any

import pytest

from common.block_hash import hash_blocks, hash_root
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import as_tokens
from common.wire import pack_tokens
from common.wire_names import FinishReason
from engine.core import EngineCore
from engine.events import EngineEvent, Tokens
from engine.fake import FakeExecutor
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.steps.scheduler import SchedulerLimits
from kvrelay.v1 import inference_pb2, sampling_pb2
from measure.simulate.chaos.oracles import AnswerCheck, Violation
from measure.simulate.chaos.questions import Question, QuestionBook
from measure.simulate.chaos.settings import ChaosSettings, FaultKind, draw_first_settings, draw_settings
from measure.simulate.chaos.walk import BLOCK_SIZE, DRAIN_BOUND_S, run_walk
from measure.simulate.faults import FaultRates
from tests.clock import ManualClock
from worker.worker_tiers import WorkerTiers

BAD_WEEK = FaultRates(
    lose=0.01, repeat=0.01, delay=0.1, max_delay_s=1.0, stall=0.001, stall_s=6.0, corrupt=0.02, tear=0.02
)
MAX_PAUSE_S = 2.0
"""Most that a worker which stops, hangs or is cut off may cost a stream of these walks: 1.3 s until it is noticed, and
a new plan. The next thing to notice it would be the keepalive, after 5 s. (A worker whose heartbeats were late just
before may cost more: it is given up to five times as long.)"""
MAX_WAIT_S = 1.0
"""Most that a worker which leaves, or another tenant's flood, may add to a first token."""
NOTICED_SOON = frozenset(
    {FaultKind.CRASH, FaultKind.STOP, FaultKind.HUNG_STEP, FaultKind.HUNG_LOOP, FaultKind.CUT, FaultKind.ONE_WAY_CUT}
)


@pytest.mark.parametrize("seed", [1, 2, 3, 6, 22])
def test_swarm_breaks_no_invariant(seed: int) -> None:
    settings = draw_settings(seed, num_requests=80)
    report = run_walk(settings)
    assert report.violations == []
    assert report.outcomes.total() == settings.num_requests


FOUND: dict[str, ChaosSettings] = {
    "poison whose last tokens are generated again by each worker": draw_first_settings(59, num_requests=90),
    "an innocent one sent to workers of whose death no router knew": draw_settings(10045, num_requests=80),
    "one whose prefill worker left the membership with its call still open": draw_settings(10198, num_requests=150),
    "an innocent one whose worker died after its attempt had failed elsewhere": draw_settings(20224, num_requests=50),
    "innocents beside poison that was cleared by tokens on their way": draw_settings(20603, num_requests=90),
    "a client that streams and asks again for a lost token": replace(
        draw_settings(923, num_requests=100), direct_share=0.5
    ),
    "workers with few pages whose clients leave early": ChaosSettings(
        num_requests=150,
        seed=3,
        faults=frozenset({FaultKind.SLOW, FaultKind.FLOOD, FaultKind.DRAIN}),
        num_prefill=1,
        num_decode=2,
        rate_per_s=40.0,
        mean_gap_s=0.5,
        cancelled_share=0.5,
        patience_s=0.1,
        num_blocks=32,
    ),
}
"""Walks that once broke an invariant, just long enough to break it again without the mend."""


def test_walk_with_tiers_breaks_no_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = WorkerTiers.read

    async def counted(self: WorkerTiers, *args: Any) -> int:
        reads.append(await read(self, *args))
        return reads[-1]

    monkeypatch.setattr(WorkerTiers, "read", counted)
    settings = replace(draw_settings(30007, num_requests=120), num_blocks=32, num_tier_blocks=512)
    assert run_walk(settings).violations == []
    assert any(reads), "blocks came back"


@pytest.mark.parametrize("settings", FOUND.values(), ids=FOUND)
def test_walk_that_once_broke_an_invariant_breaks_none(settings: ChaosSettings) -> None:
    assert run_walk(settings).violations == []


def test_requests_whose_workers_only_fell_silent_are_never_refused() -> None:
    settings = ChaosSettings(
        num_requests=50,
        seed=12,
        faults=frozenset({FaultKind.STOP, FaultKind.CUT}),
        num_prefill=0,
        num_decode=4,
        rate_per_s=8.0,
        mean_gap_s=0.4,
        max_fault_s=10.0,
        cancelled_share=0.0,
    )
    report = run_walk(settings)
    assert report.violations == []
    assert report.outcomes == {"complete": 50}


def test_calls_that_reach_the_successor_of_their_worker_are_refused() -> None:
    settings = ChaosSettings(
        num_requests=40,
        seed=1,
        faults=frozenset({FaultKind.CRASH, FaultKind.LATE}),
        num_prefill=2,
        num_decode=2,
        rate_per_s=20.0,
        mean_gap_s=0.4,
        max_down_s=0.05,
        message_rates=FaultRates(delay=0.2, max_delay_s=0.5),
        may_fail=True,
    )
    report = run_walk(settings)
    assert report.violations == []
    assert report.faults[FaultKind.CRASH]


OF_ITS_OWN: dict[FaultKind, dict[str, Any]] = {
    FaultKind.CUT: {"num_requests": 60, "mean_gap_s": 1.0},  # with fewer, no lease is left to its end
    FaultKind.HUNG_STEP: {"seed": 1, "mean_gap_s": 1.0},  # no other worker goes on where all of a pool hang
    FaultKind.FLOOD: {"mean_gap_s": 1.0},
}


@pytest.mark.parametrize("fault", sorted(FaultKind))
def test_each_fault_alone_happens_and_breaks_no_invariant(fault: FaultKind) -> None:
    settings = ChaosSettings(
        num_requests=30, seed=2, faults=frozenset({fault}), mean_gap_s=0.5, message_rates=BAD_WEEK, poison_gap_s=1.0
    )
    report = run_walk(replace(settings, **OF_ITS_OWN.get(fault, {})))
    assert report.violations == []
    assert report.faults[fault]
    assert set(report.faults) == {fault}
    assert report.drain_s < DRAIN_BOUND_S
    assert report.longest_pause_s < (MAX_PAUSE_S if fault in NOTICED_SOON else DRAIN_BOUND_S)
    assert report.longest_wait_s < MAX_WAIT_S or fault not in {FaultKind.DRAIN, FaultKind.FLOOD}


def test_clients_that_stream_from_workers_get_every_token_through_faults() -> None:
    faults = frozenset({FaultKind.LATE, FaultKind.REPEATED, FaultKind.CRASH, FaultKind.STOP, FaultKind.FLIP})
    report = run_walk(ChaosSettings(num_requests=60, seed=5, faults=faults, direct_share=1.0, mean_gap_s=1.2))
    assert report.violations == []
    assert report.num_direct >= 55
    assert min(report.faults[fault] for fault in (FaultKind.STOP, FaultKind.CRASH, FaultKind.FLIP)) > 0


@pytest.mark.parametrize("direct_share", [0.0, 1.0])
def test_clients_of_a_router_that_died_go_on_at_another_one(direct_share: float) -> None:
    report = run_walk(
        ChaosSettings(
            num_requests=40,
            seed=1,
            faults=frozenset({FaultKind.ROUTER_CRASH}),
            direct_share=direct_share,
            mean_gap_s=0.2,
            rate_per_s=30.0,
            cancelled_share=0.0,
        )
    )
    assert report.violations == []
    assert report.outcomes == {"complete": 40}
    assert report.num_lost_routers


def test_walk_with_the_same_seed_is_the_same() -> None:
    first, second = (run_walk(ChaosSettings(num_requests=50, seed=5)) for _ in range(2))
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


def test_answers_of_the_book_are_those_of_an_idle_engine() -> None:
    book = QuestionBook(random.Random(1), block_size=BLOCK_SIZE)
    questions = [book.draw() for _ in range(12)] + [book.fresh()]
    assert max(question.sampling.n for question in questions) > 1
    for question in questions:
        executor = FakeExecutor(num_blocks=64, block_size=BLOCK_SIZE)
        limits = SchedulerLimits(block_size=BLOCK_SIZE, max_step_tokens=256, max_running=8, max_waiting=1)
        core, sampling = EngineCore(executor, limits, ManualClock()), question.sampling
        answers: list[list[int]] = [[] for _ in range(sampling.n)]

        def take(event: EngineEvent, answers: list[list[int]] = answers) -> None:
            for output in event.tokens if isinstance(event, Tokens) else ():
                answers[output.sample_index].append(output.token_id)

        root = hash_root(model_fingerprint=executor.kv.shape.fingerprint)
        request = EngineRequest(
            request_id=RequestId("question"),
            prompt_token_ids=question.prompt,
            sampling=sampling,
            hash_root=root,
            block_hashes=hash_blocks(question.prompt, root=root, block_size=BLOCK_SIZE),
        )
        assert isinstance(core.add(request, take), Group)
        while core.has_work:
            for told, event in core.step():
                told.sink(event)
        assert tuple(map(tuple, answers)) == question.answers
