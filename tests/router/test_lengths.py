"""Predicted lengths of answers."""

import math
import random
from array import array
from typing import Any

import pytest

from common.block_hash import hash_blocks
from common.ids import RequestId
from common.lifecycle import LifeCycle
from common.sampling import SamplingParams
from router.record.account import open_account
from router.record.lengths import GUESSED_TOKENS, AnswerLengths
from router.record.record import Job, RunningRequest
from router.record.ticket import Ticket
from router.tenants import NO_TERMS, Tenant
from tests.clock import ManualClock
from tests.router.fake_worker import MODEL

BLOCK = MODEL.block_size


def make_job(*, num_blocks: int = 0, first: int = 0, is_chat: bool = False, **sampling: Any) -> Job:
    """Return a request whose prompt counts up from `first`."""
    prompt = array("I", range(first, first + num_blocks * BLOCK + 1))
    return Job(
        request_id=RequestId("r"),
        prompt_token_ids=prompt,
        prompt_hashes=hash_blocks(prompt, root=MODEL.root, block_size=BLOCK),
        sampling=SamplingParams(**{"max_tokens": 100_000, **sampling}),
        model=MODEL,
        rendered_unix_s=int(is_chat),
    )


def make_record(clock: ManualClock, **fields: Any) -> RunningRequest:
    """Return a running request of a tenant "t" on a clock; `fields` are those of `make_job`."""
    job, now_s = make_job(**fields), clock.monotonic()
    account = open_account(Tenant(name="t"), now_s=now_s)
    ticket = Ticket(number=0, account=account, terms=NO_TERMS, received_s=now_s, on_close=lambda _ticket: None)
    return RunningRequest(job, ticket, LifeCycle(job.request_id, clock), clock)


def learn(lengths: AnswerLengths, job: Job, *num_tokens: int, tenant: str = "t") -> None:
    for length in num_tokens:
        lengths.learn(job, tenant, [length])


def test_first_answer_is_guessed_and_cut_at_its_limit() -> None:
    lengths = AnswerLengths()
    assert lengths.expect(make_job(), "t").mean == pytest.approx(GUESSED_TOKENS, rel=0.02)
    # The mean of min(length, 256) of an exponential length, not the least of 256 and its mean.
    assert lengths.expect(make_job(max_tokens=256), "t").mean == pytest.approx(256 * (1 - math.exp(-1)), rel=0.03)


def test_equal_answers_are_expected_to_the_token() -> None:
    lengths = AnswerLengths()
    learn(lengths, make_job(), *[500] * 300)
    forecast = lengths.expect(make_job(), "t")
    assert (forecast.num_tokens, forecast.lower, forecast.upper) == (500, 500, 500)


def test_each_sample_of_a_request_is_learned() -> None:
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.learn(make_job(n=2), "t", [10, 30])
    assert lengths.expect(make_job(n=2), "t").mean == pytest.approx(20, rel=0.03)


def test_interval_holds_four_answers_in_five() -> None:
    lengths, draw = AnswerLengths(), random.Random(1)
    drawn = [1 + int(draw.lognormvariate(5, 0.8)) for _ in range(3000)]
    learn(lengths, make_job(), *drawn[:1000])
    forecast = lengths.expect(make_job(), "t")
    held = [forecast.lower / 1.1 <= length <= forecast.upper * 1.1 for length in drawn[1000:]]
    assert 0.75 < sum(held) / len(held) < 0.87


def test_answers_cut_by_their_limit_do_not_make_others_seem_short() -> None:
    lengths, draw = AnswerLengths(), random.Random(2)
    for number in range(4000):
        job = make_job(max_tokens=100 if number % 2 else 4000)
        lengths.learn(job, "t", [min(1 + int(draw.expovariate(1 / 300)), job.sampling.max_tokens)])
    assert lengths.expect(make_job(max_tokens=2000), "t").mean == pytest.approx(300, rel=0.15)
    assert lengths.expect(make_job(max_tokens=100), "t").mean == pytest.approx(300 * (1 - math.exp(-1 / 3)), rel=0.05)


def test_tenant_without_answers_is_expected_to_be_like_the_others() -> None:
    lengths = AnswerLengths()
    learn(lengths, make_job(), *[40] * 200, tenant="a")
    assert lengths.expect(make_job(), "b").mean == pytest.approx(40, rel=0.2)
    learn(lengths, make_job(), *[900] * 50, tenant="b")
    assert lengths.expect(make_job(), "b").mean == pytest.approx(900, rel=0.1)
    assert lengths.expect(make_job(), "a").mean == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize(
    "other",
    [
        {"num_blocks": 40},
        {"max_tokens": 50_000},
        {"is_chat": True},
        {"n": 3},
        {"stop": ("END",)},
    ],
)
def test_kinds_of_requests_are_told_apart(other: dict[str, Any]) -> None:
    lengths = AnswerLengths()
    for number in range(100):
        learn(lengths, make_job(first=10_000 * number), 20)
        learn(lengths, make_job(first=10_000 * number, **other), 800)
    assert lengths.expect(make_job(first=9_999_999), "t").mean < 50
    assert lengths.expect(make_job(first=9_999_999, **other), "t").mean > 700


def test_next_turn_of_a_chat_is_expected_to_be_like_the_turns_before() -> None:
    lengths = AnswerLengths()
    for chat in range(200):
        learn(lengths, make_job(num_blocks=20, first=1000 * chat), 30 if chat % 2 else 600)
    short = lengths.expect(make_job(num_blocks=23, first=199_000), "t").mean
    long = lengths.expect(make_job(num_blocks=23, first=198_000), "t").mean
    assert short + 50 < long


def test_template_that_all_prompts_begin_with_does_not_hide_their_sizes() -> None:
    lengths = AnswerLengths()
    for _ in range(300):
        learn(lengths, make_job(num_blocks=1), 20)
        learn(lengths, make_job(num_blocks=40), 800)
    assert lengths.expect(make_job(num_blocks=1), "t").mean == pytest.approx(20, rel=0.5)


def test_answer_that_goes_on_elsewhere_is_expected_to_have_the_rest() -> None:
    lengths = AnswerLengths()
    learn(lengths, make_job(), *[100, 500] * 100)
    assert lengths.expect(make_job(), "t", num_done=200).mean == pytest.approx(300, rel=0.05)
    assert lengths.expect(make_job(max_tokens=260), "t", num_done=200).mean == pytest.approx(60, rel=0.05)
    assert lengths.expect(make_job(), "t", num_done=90_000).num_tokens >= 1


def test_answer_that_cannot_end_early_has_its_limit() -> None:
    lengths = AnswerLengths()
    learn(lengths, make_job(), *[10] * 100)
    forever = make_job(ignore_eos=True, max_tokens=3000)
    assert lengths.expect(forever, "t").num_tokens == 3000
    learn(lengths, forever, *[3000] * 100)
    assert lengths.expect(make_job(), "t").mean == pytest.approx(10, rel=0.5)
    assert lengths.expect(make_job(min_tokens=70), "t").mean >= 70


def test_answers_that_change_are_followed() -> None:
    lengths = AnswerLengths()
    learn(lengths, make_job(), *[1000] * 5000)
    learn(lengths, make_job(), *[10] * 1000)
    assert lengths.expect(make_job(), "t").mean == pytest.approx(10, rel=0.5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.record.lengths.MAX_KINDS", 8)
    monkeypatch.setattr("router.record.lengths.MAX_PREFIXES", 32)
    lengths = AnswerLengths()
    for number in range(40):
        learn(lengths, make_job(num_blocks=2, first=3 * BLOCK * number), 5, tenant=str(number))
    tables = lengths._kinds, lengths._prefixes  # noqa: SLF001
    assert [len(table._entries) for table in tables] == [8, 32]  # noqa: SLF001
