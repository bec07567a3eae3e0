"""Rate limits and the pace of the line, with given times."""

import pytest

from common.errors import RefusalCause
from router.placement.limits import MAX_RETRY_S, UNKNOWN_RETRY_S, Pace, TokenBucket
from router.record.account import MAX_INQUIRIES, open_account
from router.record.ticket import Ticket
from router.tenants import NO_TERMS, Tenant


def test_bucket_holds_one_minutes_worth_and_refills_at_its_rate() -> None:
    bucket = TokenBucket(per_min=60, now_s=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(10, 4.0) == pytest.approx(6.0)
    assert bucket.wait_s(60, 1000.0) == 0


def test_bucket_lets_a_request_larger_than_itself_in_when_it_is_full() -> None:
    bucket = TokenBucket(per_min=60, now_s=0.0)
    assert bucket.wait_s(90, 0.0) == 0
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(90, 0.0) == pytest.approx(90.0)


def test_bucket_takes_back_no_more_than_it_holds() -> None:
    bucket = TokenBucket(per_min=60, now_s=0.0)
    bucket.take(-100, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)


def test_pace_before_the_first_departure_is_a_guess() -> None:
    assert Pace().promise_s(100.0) == UNKNOWN_RETRY_S


def test_pace_promises_each_coming_place_once() -> None:
    pace = Pace()
    pace.begin(0.0)
    for number in range(1, 5):
        pace.depart(number * 2.0)
    assert [pace.promise_s(8.0) for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0])
    assert pace.promise_s(14.0) == pytest.approx(6.0)  # as slow as it has stood still; earlier promises are over


def test_pace_of_a_line_that_stands_still_is_as_slow_as_that() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.depart(1.0)
    assert pace.promise_s(21.0) == pytest.approx(20.0)
    assert pace.promise_s(1000.0) == MAX_RETRY_S


def test_pace_does_not_count_the_time_of_an_empty_line() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.depart(1.0)
    pace.begin(500.0)
    pace.depart(501.0)
    assert pace.gap_s(501.0) == pytest.approx(1.0)


def test_pace_forgets_how_it_once_was() -> None:
    pace = Pace()
    pace.begin(0.0)
    for _ in range(1000):
        pace.depart(0.01)
    for number in range(1, 61):
        pace.depart(float(number))
    assert pace.gap_s(60.0) == pytest.approx(1.0, rel=0.3)


def test_account_refuses_by_queue_then_request_rate_then_token_rate_and_says_when() -> None:
    tenant = Tenant(name="t", max_queued=1, requests_per_min=2, tokens_per_min=600)
    account = open_account(tenant, now_s=0.0)
    account.waiting[0] = Ticket(
        number=0, account=account, terms=NO_TERMS, received_s=0.0, on_close=lambda _ticket: None
    )
    full = account.take_request(0.0)
    account.waiting.clear()
    assert account.take_request(0.0) is account.take_request(0.0) is None
    rated = account.take_request(0.0)
    assert account.take_tokens(900, 0.0) is None
    spent = account.take_request(60.0)
    assert full is not None
    assert rated is not None
    assert spent is None  # 900 of 600 were taken, a minute brought 600
    assert (full.cause, rated.cause) == (RefusalCause.TENANT_QUEUE_FULL, RefusalCause.REQUEST_RATE)
    assert rated.retry_after_s == pytest.approx(30.0)
    assert "tenant t: more than 2 requests per minute" in rated.reason


def test_calls_that_only_tokenize_count_at_the_request_rate_and_are_bounded_at_once() -> None:
    account = open_account(Tenant(name="t", max_queued=1, requests_per_min=2), now_s=0.0)
    assert account.take_inquiry(0.0) is None
    assert account.take_request(0.0) is None
    rated = account.take_inquiry(0.0)
    account.num_inquiries = MAX_INQUIRIES
    full = account.take_inquiry(60.0)
    assert rated is not None
    assert full is not None
    assert (rated.cause, full.cause) == (RefusalCause.REQUEST_RATE, RefusalCause.TENANT_QUEUE_FULL)
    assert "tenant t: 256 calls tokenize; the limit is 256" in full.reason


def test_account_in_debt_refuses_before_the_size_is_known() -> None:
    account = open_account(Tenant(name="t", tokens_per_min=60), now_s=0.0)
    assert account.take_tokens(100, 0.0) is None
    refused = account.take_request(0.0)
    assert refused is not None
    assert refused.cause is RefusalCause.TOKEN_RATE
    assert refused.retry_after_s == pytest.approx(41.0)


def test_request_refused_for_its_tokens_does_not_count_against_the_request_rate() -> None:
    account = open_account(Tenant(name="t", requests_per_min=1, tokens_per_min=60), now_s=0.0)
    assert account.take_request(0.0) is None
    assert account.take_tokens(50, 0.0) is None
    account.correct_tokens(-10, 0.0)
    assert account.take_request(60.0) is None
    assert account.take_tokens(60, 60.0) is None
    assert account.take_request(119.0) is not None
    account = open_account(Tenant(name="t", requests_per_min=1, tokens_per_min=60), now_s=0.0)
    account.correct_tokens(30, 0.0)
    assert account.take_request(0.0) is None
    assert account.take_tokens(40, 0.0) is not None
    assert account.take_request(0.0) is None
