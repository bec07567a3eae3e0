"""A request that ends its workers is stopped before it has ended all of them; others beside it get their answers."""

import asyncio
from collections.abc import Collection

import pytest

from common.errors import CrashSuspected
from common.ids import Epoch, WorkerId
from common.tokens import as_tokens
from router.fleet.lives import Life
from router.record.crash_budget import NUM_CLEARING_TOKENS, CrashBudget, Losses
from tests.clock import ManualClock
from tests.router.fake_worker import DECODE, TIMEOUT_S, FakeWorker, answer
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster
from tests.router.members import book, make_member
from tests.router.test_lengths import make_record

POISON = prompt_of(13)


def life(number: int) -> tuple[WorkerId, Epoch]:
    return WorkerId(f"d{number}"), Epoch(number)


def note(losses: Losses, *numbers: int, num_tokens: int = 0, now_s: float = 1.0) -> None:
    losses.note([life(number) for number in numbers], num_tokens=num_tokens, now_s=now_s)


def ready_at_start(*numbers: int) -> dict[Life, float]:
    """Return lives that are over and were not ready again after any failure."""
    return dict.fromkeys([life(number) for number in numbers], 0.0)


def test_new_tokens_clear_a_request_of_earlier_losses() -> None:
    losses = Losses()
    note(losses, 1, num_tokens=5)
    note(losses, 2, num_tokens=5)
    losses.is_quarantined = True
    note(losses, 3, num_tokens=5 + NUM_CLEARING_TOKENS)
    assert losses.lives == [life(3)]
    assert not losses.is_quarantined


def test_tokens_that_a_worker_had_not_sent_when_it_died_clear_no_request() -> None:
    losses = Losses()
    for number in range(NUM_CLEARING_TOKENS):
        note(losses, number, num_tokens=5 + number)
    assert len(losses.lives) == NUM_CLEARING_TOKENS


def test_one_life_counts_once_however_many_calls_it_fails() -> None:
    losses = Losses()
    for _ in range(5):
        note(losses, 1)
    assert losses.count(ready_at_start(1)) == 1


def test_host_that_takes_both_workers_of_an_attempt_along_is_one_loss() -> None:
    losses = Losses()
    note(losses, 1, 2)
    assert losses.count(ready_at_start(1, 2)) == 1


def test_worker_that_ends_after_an_attempt_counts_for_the_one_that_it_ended() -> None:
    losses = Losses()
    note(losses, 1, 2)
    note(losses, 1, 3)
    assert losses.count(ready_at_start(1, 2)) == 2


def test_worker_that_answered_after_a_failed_attempt_did_not_end_by_it() -> None:
    losses = Losses()
    note(losses, 1, 2, now_s=1.0)
    note(losses, 3, now_s=3.0)
    ended = {life(1): 2.0, life(3): 0.0}
    assert losses.count(ended) == 1
    note(losses, 1, now_s=4.0)
    assert losses.count(ended) == 2, "the later attempt may have ended it"


async def is_refused(*, samples: range, in_quarantine: bool, has_answered: bool = True, num_lost: int = 3) -> bool:
    """Return whether a request of three samples is refused after its last loss, in an attempt with some of them."""
    clock = ManualClock()
    record = make_record(clock, n=3)
    for number in range(num_lost):
        note(record.losses, number)

    async def all_ended(lives: Collection[Life]) -> dict[Life, float]:
        return dict.fromkeys(lives, 0.0)

    failed = book(make_member())
    failed.is_quarantined, failed.has_answered = in_quarantine, has_answered
    try:
        await CrashBudget(3, all_ended, clock).weigh(record, failed, samples=samples)
    except CrashSuspected:
        return True
    assert record.losses.is_quarantined
    return False


def test_tokens_of_its_other_samples_clear_no_request() -> None:
    record = make_record(ManualClock(), n=3)
    for sample in (0, 1):
        record.ledger.resume(sample, as_tokens(range(40 + sample)))
    assert record.num_steps_done == 0, "the third may crash its workers"
    record.ledger.finish(2)
    assert record.num_steps_done == 40


async def test_samples_that_run_apart_are_not_refused_for_a_loss_outside_of_quarantine() -> None:
    assert not await is_refused(samples=range(1), in_quarantine=False), "another request may have ended the worker"
    assert await is_refused(samples=range(1), in_quarantine=True)
    assert await is_refused(samples=range(3), in_quarantine=False)


async def test_request_whose_last_worker_never_answered_gets_one_more() -> None:
    assert not await is_refused(samples=range(3), in_quarantine=True, has_answered=False), "it may have died before"
    assert await is_refused(samples=range(3), in_quarantine=True, has_answered=False, num_lost=4)


async def refused(cluster: TestCluster) -> CrashSuspected:
    """Send the poison and return its refusal."""
    with pytest.raises(CrashSuspected) as caught:
        await cluster.generate(make_request(13))
    return caught.value


async def test_poison_is_refused_after_its_last_worker_and_the_others_get_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.fleet.lives.NEWS_TIMEOUT_S", TIMEOUT_S)
    workers = [FakeWorker(f"d{number}", DECODE, poison=POISON) for number in range(2)]
    for worker in workers:
        worker.gates.close("token 2")
    async with running_cluster(*workers, config=config_with(max_lost_workers=3)) as cluster:
        innocents = [asyncio.create_task(cluster.generate(make_request(20 + number))) for number in range(4)]
        await cluster.until(lambda _router: sum(worker.num_running_calls for worker in workers) == 4)
        refusing = asyncio.create_task(refused(cluster))
        await cluster.until(lambda _router: sum(worker.num_crashes for worker in workers) >= 2)
        for worker in workers:
            worker.gates.open("token 2")
        for number, innocent in enumerate(innocents):
            assert (await innocent).token_ids() == answer(prompt_of(20 + number), 6)
        assert "3 workers were lost" in (await refusing).message
        assert sum(worker.num_crashes for worker in workers) == 3
        assert "it is taken again in 600 s" in (await refused(cluster)).message
        assert sum(worker.num_crashes for worker in workers) == 3, "the same prompt is refused at once"
        await cluster.until_idle()
