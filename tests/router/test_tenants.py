"""Tenants at the front door."""

import asyncio
from typing import Any

import pytest

from common.block_hash import hash_root
from common.config import ServingConfig, parse_config
from common.errors import Overloaded, Unauthenticated
from common.wire import pack_tokens
from kvrelay.client import AsyncClient, ServiceTerms
from router.line import admission
from tests.router.fake_worker import BLOCK_KEY, FINGERPRINT, ROOT, answer, full_pair, hashes_of, pair, timing_of, trio
from tests.router.fakes import PATIENT_SLO_S, config_with, make_request, prompt_of, running_cluster
from tests.router.http.clients import fetch

KEYS = {name: f"key-of-tenant-{name}-0001" for name in "ab"}


def serving(*, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, **router: Any) -> ServingConfig:
    """Return a configuration with the tenants a and b and their KEYS."""
    tenants = [{"name": name, "api_keys": [KEYS[name]], **(fields or {})} for name, fields in (("a", a), ("b", b))]
    door = {"local_prefill_max_tokens": 0, "auth": "api_key", "salt_secret": "x" * 32, **router}
    slo = {"ttft_s": PATIENT_SLO_S}
    return parse_config({"router": door, "tenants": tenants, "slo": slo}, source="test")


async def ask(
    client: AsyncClient, num_tokens: int = 10, terms: ServiceTerms | None = None, *, timeout_s: float = 60.0
) -> list[int]:
    generation = await client.generate(
        prompt_of(num_tokens), max_tokens=6, temperature=0, timeout_s=timeout_s, terms=terms
    )
    return list(generation.samples[0].token_ids)


async def test_generate_with_a_key_is_served_and_without_one_or_with_another_is_not() -> None:
    async with running_cluster(*pair(), config=serving()) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as client:
            assert await ask(client) == answer(prompt_of(10), 6)
        for key in (None, "key-of-nobody-000000"):
            async with cluster.client(api_key=key) as client:
                with pytest.raises(Unauthenticated):
                    await ask(client)
                with pytest.raises(Unauthenticated):
                    await client.tokenize("hi")
        ended = await cluster.until_idle()
        assert (ended.num_failed, ended.num_rejected) == (0, 2)


async def test_blocks_of_two_tenants_with_one_prompt_have_nothing_in_common() -> None:
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=serving()) as cluster:
        for name in "aba":
            async with cluster.client(api_key=KEYS[name]) as client:
                await ask(client)
    first, other, again = (request.sequence for request in prefill.requests)
    assert (first.hash_root == again.hash_root) and first.hash_root not in (other.hash_root, ROOT)
    assert not set(hashes_of(first)) & set(hashes_of(other))


async def test_hashes_of_clients_without_a_key_cannot_be_computed_without_the_block_key() -> None:
    prefill, decode = pair()
    async with (
        running_cluster(prefill, decode, config=config_with(local_prefill_max_tokens=0)) as cluster,
        cluster.client() as client,
    ):
        await ask(client)
    root = prefill.requests[0].sequence.hash_root
    assert root == hash_root(model_fingerprint=FINGERPRINT, key=BLOCK_KEY)
    assert root != hash_root(model_fingerprint=FINGERPRINT)


@pytest.mark.usefixtures("no_refill")
@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", b'{"prompt": "hi", "return_token_strs": true}'), ("/detokenize", b'{"tokens": [104, 105]}')],
)
async def test_tokenizing_counts_at_the_request_rate_by_either_door(path: str, body: bytes) -> None:
    config = serving(a={"requests_per_min": 2}, http_port=0)
    async with running_cluster(*pair(), config=config) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as client:
            assert (await client.tokenize("hi")).token_ids == (104, 105)
            port, key = cluster.router.http_port, f"Bearer {KEYS['a']}"
            assert (await fetch(port, "POST", path, body, authorization=key))[0] == 200
            status, headers, _body = await fetch(port, "POST", path, body, authorization=key)
            assert (status, headers["retry-after"]) == (429, "30")
            with pytest.raises(Overloaded, match="tenant a: more than 2 requests per minute"):
                await client.tokenize("hi")
        async with cluster.client(api_key=KEYS["b"]) as client:
            assert await client.tokenize("hi")
        assert [account.num_inquiries for account in cluster.router.door.parts.admission.accounts] == [0, 0]


@pytest.mark.usefixtures("no_refill")
async def test_request_rate_refuses_only_its_tenant_and_says_when_to_retry() -> None:
    async with running_cluster(*pair(), config=serving(a={"requests_per_min": 2})) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as client:
            await ask(client)
            await ask(client)
            with pytest.raises(Overloaded, match="tenant a: more than 2 requests per minute") as caught:
                await ask(client)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s == pytest.approx(30)
        async with cluster.client(api_key=KEYS["b"]) as client:
            assert await ask(client) == answer(prompt_of(10), 6)


@pytest.mark.usefixtures("no_refill")
async def test_token_rate_counts_prompt_and_output_that_was_really_written() -> None:
    async with running_cluster(*pair(), config=serving(a={"tokens_per_min": 40})) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as client:
            await ask(client)  # 10 tokens in, 6 out
            await ask(client)
            with pytest.raises(Overloaded, match="tenant a: more than 40 tokens per minute") as caught:
                await ask(client)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s == pytest.approx((16 - 8) / 40 * 60)


async def test_waiting_requests_of_two_tenants_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SECOND_COST", 0.0)  # reading a request may cost more on a busy machine
    prefill, decode = full_pair()
    async with running_cluster(prefill, decode, config=serving()) as cluster:
        waiting = []
        async with (
            cluster.client(api_key=KEYS["a"]) as a,
            cluster.client(api_key=KEYS["b"]) as b,
        ):
            for position, (client, num_tokens) in enumerate([(a, 8), (a, 9), (a, 10), (b, 11)]):
                waiting.append(asyncio.create_task(ask(client, num_tokens)))
                await cluster.until_queued(position + 1)
            decode.set_load(num_free_blocks=6)  # room for one at a time
            await asyncio.gather(*waiting)
    assert decode.prompt_lengths == [8, 11, 9, 10]


async def test_higher_priority_goes_first_as_far_as_the_tenant_may_claim_it() -> None:
    prefill, decode = full_pair()
    config = parse_config(
        {
            "router": {"local_prefill_max_tokens": 0},
            "tenants": [{"name": "default", "max_priority": 1}],
            "slo": {"ttft_s": PATIENT_SLO_S},
        },
        source="test",
    )
    async with running_cluster(prefill, decode, config=config) as cluster:
        requests = [make_request(num_tokens) for num_tokens in (10, 11, 12)]
        for request, priority in zip(requests, (0, 1, 99), strict=True):
            request.priority = priority
        replies = await cluster.queue(*requests)
        decode.set_load(num_free_blocks=6)  # room for one at a time
        await replies
    assert decode.prompt_lengths == [11, 12, 10]


async def test_request_that_cannot_meet_its_deadline_is_refused_before_any_prefill() -> None:
    prefill, decode = pair()
    prefill.timing = decode.timing = timing_of(s_per_prompt_token=5.0)
    async with running_cluster(prefill, decode) as cluster:
        with pytest.raises(Overloaded, match="the caller's deadline leaves") as caught:
            await cluster.generate(make_request(10), timeout_s=25.0)
        assert caught.value.retry_after_s is not None
        assert 24.0 < caught.value.retry_after_s < 55.0  # the more of the 25 s have passed, the more
        assert not prefill.requests
        assert not decode.requests
        status = await cluster.until_idle()
        assert (status.num_failed, status.num_rejected, status.num_refused) == (0, 1, 1)
        assert (await cluster.generate(make_request(10), timeout_s=200.0)).token_ids() == answer(prompt_of(10), 6)


async def test_long_cold_prompt_gives_way_to_a_short_one_that_comes_soon_after_it() -> None:
    prefill, decode = full_pair()
    prefill.timing = decode.timing = timing_of(s_per_prompt_token=0.3)  # "soon" is within a minute
    async with running_cluster(prefill, decode, config=config_with(shed="none")) as cluster:
        replies = await cluster.queue(make_request(100), make_request(10))
        decode.set_load(num_free_blocks=30)  # room for one at a time
        await replies
    assert decode.prompt_lengths == [10, 100]


def overloaded(overload: str | None, *, shed: str = "deadline") -> ServingConfig:
    """Return the configuration of a cluster whose only tenant chooses what becomes of late requests."""
    tenant = {"name": "default", "overload": overload, "shortened_max_tokens": 2}
    router = {"local_prefill_max_tokens": 0, "shed": shed}
    return parse_config({"router": router, "tenants": [tenant], "slo": {"ttft_s": PATIENT_SLO_S}}, source="test")


@pytest.mark.parametrize(
    ("overload", "shed", "num_tokens"),
    [
        ("refuse", "none", None),
        ("wait", "slo", 6),
        ("shorten", "slo", 2),
        ("yield", "slo", 6),
        (None, "slo", None),
        (None, "deadline", 6),
    ],
)
async def test_tenant_chooses_what_becomes_of_a_request_that_will_be_late(
    overload: str | None, shed: str, num_tokens: int | None
) -> None:
    prefill, decode = pair()
    prefill.timing = decode.timing = timing_of(s_per_prompt_token=0.5)
    async with running_cluster(prefill, decode, config=overloaded(overload, shed=shed)) as cluster:
        request = make_request(10)
        request.objective.ttft_s = 4.5
        if num_tokens is None:
            with pytest.raises(Overloaded, match=r"the objective of 4\.5 s") as caught:
                await cluster.generate(request)
            assert caught.value.retry_after_s is not None
            (refused,) = (await cluster.until_idle()).refusals
            assert (refused.tenant, refused.cause, refused.num_refused) == ("default", "slo", 1)
        else:
            reply = await cluster.generate(request)
            assert reply.token_ids() == answer(prompt_of(10), 6)[:num_tokens]
            assert [plan.shortened_max_tokens for plan in reply.plans] == [2 if overload == "shorten" else 0]
            await cluster.until_idle()


async def test_request_in_time_is_not_shortened() -> None:
    prefill, decode = pair()
    prefill.timing = decode.timing = timing_of(s_per_prompt_token=0.01)
    async with running_cluster(prefill, decode, config=overloaded("shorten")) as cluster:
        reply = await cluster.generate(make_request(10))
        assert reply.token_ids() == answer(prompt_of(10), 6)
        assert reply.plans[0].shortened_max_tokens == 0


async def test_shortened_answer_that_loses_its_worker_ends_where_it_would_have() -> None:
    prefill, first, second = trio()
    for worker in (prefill, first, second):
        worker.timing = timing_of(s_per_prompt_token=0.5)
    first.gates.close("token 1")
    async with running_cluster(prefill, first, second, config=overloaded("shorten")) as cluster:
        request = make_request(10)
        request.objective.ttft_s = 4.5
        running = asyncio.create_task(cluster.generate(request))
        await first.gates.reached("token 1")
        await first.die()
        assert (await running).token_ids() == answer(prompt_of(10), 2)


async def test_resumed_answer_is_not_shortened_again() -> None:
    prefill, decode = pair()
    prefill.timing = decode.timing = timing_of(s_per_prompt_token=0.5)
    async with running_cluster(prefill, decode, config=overloaded("shorten")) as cluster:
        begun = answer(prompt_of(10), 3)
        request = make_request(10)
        request.objective.ttft_s = 4.5
        request.resume.fingerprint, request.sampling.seed = FINGERPRINT, 7
        request.resume.samples.add(tokens=pack_tokens(begun))
        reply = await cluster.generate(request)
        assert begun + [token.token_id for token in reply.tokens] == answer(prompt_of(10), 6)


async def test_late_requests_of_a_tenant_that_yields_go_after_those_of_all_tenants() -> None:
    prefill, decode = full_pair()
    late, waiting = ServiceTerms(ttft_s=1e-6), []
    async with (
        running_cluster(prefill, decode, config=serving(a={"overload": "yield"})) as cluster,
        cluster.client(api_key=KEYS["a"]) as a,
        cluster.client(api_key=KEYS["b"]) as b,
    ):
        for client, num_tokens, terms in ((a, 8, late), (a, 9, late), (b, 10, late), (b, 11, late), (a, 12, None)):
            waiting.append(asyncio.create_task(ask(client, num_tokens, terms)))
            await cluster.until_queued(len(waiting))
        decode.set_load(num_free_blocks=6)  # room for one at a time
        await asyncio.gather(*waiting)
    assert sorted(decode.prompt_lengths[:3]) == [10, 11, 12]
    assert decode.prompt_lengths[3:] == [8, 9]
