"""Marks of prompts, from a door to the workers' pages and back: pinned, counted, and no other tenant's business."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from kvrelay.client import CacheMark, CacheWrite, Generation
from tests.builders import BLOCK_SIZE
from tests.e2e.in_process import System, running_system

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

KEYS = {name: f"key-of-tenant-{name}-0001" for name in ("a", "b")}
SYSTEM = "You know the whole library by heart. " * 8
ASKED = "Which book? " * 4
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}
GREEDY: Any = {"model": "", "extra_body": {"temperature": 0}}  # the official client names no temperature any more
REMOTE: dict[str, Any] = {"local_prefill_max_tokens": 0}
LOCAL: dict[str, Any] = {"policy": "round_robin", "local_prefill_max_tokens": 4096}


@asynccontextmanager
async def serving(router: dict[str, Any] = REMOTE, *, cache_gib: float = 1.0, **fake: Any) -> AsyncIterator[System]:
    tenants = [{"name": name, "api_keys": [key], "cache_gib": cache_gib} for name, key in KEYS.items()]
    options = router | {"http_port": 0}
    async with running_system(router=options, tenants=tenants, **({"num_blocks": 400} | fake)) as served:
        yield served


def official_client(served: System) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic  # takes a second to import, in most processes for nothing

    url = f"http://127.0.0.1:{served.router.http_port}"
    return AsyncAnthropic(base_url=url, api_key=KEYS["a"], max_retries=0)


async def post(served: System, path: str, tenant: str, **body: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{served.router.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
        response = await http.post(path, json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ask(served: System, tenant: str = "a", **fields: Any) -> dict[str, Any]:
    return await post(served, "/v1/messages", tenant, max_tokens=3, temperature=0, **fields)


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def counts(message: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the tokens that were read, written for an hour, written for minutes, and neither."""
    usage = message["usage"]
    created = usage["cache_creation"]
    hour, minutes = created["ephemeral_1h_input_tokens"], created["ephemeral_5m_input_tokens"]
    assert hour + minutes == usage["cache_creation_input_tokens"]
    return usage["cache_read_input_tokens"], hour, minutes, usage["input_tokens"]


@pytest.mark.asyncio
async def test_what_a_mark_writes_is_told_once_and_read_afterwards() -> None:
    asked: dict[str, Any] = {
        "system": [text(SYSTEM, cache_control=HOUR), text("Be brief.")],
        "messages": [{"role": "user", "content": [text(ASKED, cache_control=MINUTES)]}],
    }
    async with serving() as served:
        first, second = await ask(served, **asked), await ask(served, **asked)
        other = await ask(served, "b", **asked)
        async with served.operator() as operator:
            tenants = {each.tenant: each for each in (await operator.status()).router.tenants}
    # The fake engine's template and tokenizer write a line for each turn and a token for each byte.
    before = "system: " + SYSTEM
    whole = before + "\nBe brief.\nuser: " + ASKED
    hour, marked = (len(part.rstrip()) // BLOCK_SIZE * BLOCK_SIZE for part in (before, whole))
    assert counts(first) == (0, hour, marked - hour, len(whole + "\nassistant:") - marked)
    read, *created, rest = counts(second)
    assert created == [0, 0] and 0 <= read - marked < 16 and read + rest == len(whole + "\nassistant:")
    assert counts(other) == counts(first)
    for tenant in tenants.values():  # on the workers that keep the blocks
        assert tenant.num_pinned_tokens in (marked, 2 * marked)
    assert tenants["a"].num_cached_tokens == read
    assert not tenants["a"].num_refused_pin_tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("router", [REMOTE, LOCAL], ids=["remote", "local"])
async def test_official_client_learns_of_a_stream_what_was_written_for_which_time(router: dict[str, Any]) -> None:
    fields: Any = GREEDY | {"max_tokens": 3, "messages": [{"role": "user", "content": ASKED * 4}]}
    async with serving(router) as served, official_client(served) as client:
        async with client.messages.stream(cache_control=HOUR, **fields) as stream:
            first = (await stream.get_final_message()).usage
        second = (await client.messages.create(**fields)).usage
        async with client.messages.stream(cache_control=HOUR, **fields) as stream:
            third = (await stream.get_final_message()).usage
    assert first.cache_creation is not None and first.cache_creation_input_tokens
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert third == second and third.cache_read_input_tokens == first.cache_creation_input_tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_is_sent_ahead_without_tokens_to_generate_is_found_later(stream: bool) -> None:
    fields: Any = GREEDY | {"messages": [{"role": "user", "content": ASKED * 4}], "cache_control": HOUR}
    async with serving() as served, official_client(served) as client:
        if stream:
            async with client.messages.stream(max_tokens=0, **fields) as events:
                ahead = await events.get_final_message()
        else:
            ahead = await client.messages.create(max_tokens=0, **fields)
        later = await client.messages.create(max_tokens=3, **fields)
    assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
    assert ahead.usage.cache_creation_input_tokens == later.usage.cache_read_input_tokens
    assert later.usage.cache_creation_input_tokens == 0 < len(later.content)


@pytest.mark.asyncio
async def test_openais_doors_tell_what_was_read_and_written_under_their_names() -> None:
    asked: dict[str, Any] = {"temperature": 0, "prompt_cache_options": {"ttl": "1h"}}
    turns = [{"role": "user", "content": ASKED * 4}]
    whole = (len("user: " + ASKED * 4 + "\nassistant:") - 1) // BLOCK_SIZE * BLOCK_SIZE
    async with serving(LOCAL) as served:
        chats = [await post(served, "/v1/chat/completions", "a", messages=turns, **asked) for _ in range(2)]
        response = await post(served, "/v1/responses", "a", input=ASKED * 4, max_output_tokens=3, **asked)
        unmarked = await post(served, "/v1/completions", "a", prompt=ASKED * 9, max_tokens=3)
    details = [chat["usage"]["prompt_tokens_details"] for chat in chats]
    read = {"cached_tokens": whole, "cache_write_tokens": 0}
    assert details == [{"cached_tokens": 0, "cache_write_tokens": whole}, read]
    assert response["usage"]["input_tokens_details"] == read
    assert unmarked["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


PROMPT = [number % 199 + 1 for number in range(200)]
OTHERS = [[number % 97 + 100, *range(1, 160)] for number in range(12)]


async def generate(served: System, prompt: list[int], *marks: CacheMark, tenant: str = "a") -> Generation:
    async with served.client(api_key=KEYS[tenant]) as client:
        return await client.generate(prompt, max_tokens=2, temperature=0, cache_marks=marks)


def told(generation: Generation) -> tuple[int, tuple[CacheWrite, ...]]:
    """Everything that a client is told of what was cached and what it wrote."""
    return generation.usage.num_cached_tokens, generation.usage.cache_writes


def held(generation: Generation) -> int:
    """Return the prompt tokens that the worker had which keeps the prompt's blocks."""
    usage = generation.usage
    return max(usage.num_cached_tokens, usage.num_decode_cached_tokens)


@pytest.mark.asyncio
@pytest.mark.parametrize("router", [REMOTE, LOCAL], ids=["remote", "local"])
async def test_pinned_prefix_is_still_there_when_others_have_filled_the_pages(router: dict[str, Any]) -> None:
    async with serving(router, num_blocks=128) as served:
        kept, lost = PROMPT, [7, *PROMPT]
        first = await generate(served, kept, CacheMark(ttl_s=300, num_tokens=160), CacheMark(ttl_s=3600, num_tokens=81))
        await generate(served, lost)
        for tenant, prompt in zip("ab" * 6, OTHERS, strict=True):
            await generate(served, prompt, tenant=tenant)
        again, gone = await generate(served, kept), await generate(served, lost)
        async with served.client(api_key=KEYS["a"]) as client:
            (decision,) = await client.explain(first.request_id)
    assert told(first) == (0, (CacheWrite(ttl_s=3600, num_tokens=80), CacheWrite(ttl_s=300, num_tokens=80)))
    assert (first.usage.num_pinned_tokens, first.usage.num_refused_pin_tokens) == (160, 0)
    assert (held(again), held(gone)) == (160, 0)
    assert (decision.outcome.num_pinned_tokens, decision.outcome.num_refused_pin_tokens) == (160, 0)


@pytest.mark.asyncio
async def test_mark_of_an_answer_of_one_token_pins_as_well() -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "cache_marks": [CacheMark(ttl_s=60)]}
    async with serving() as served, served.client(api_key=KEYS["a"]) as client:
        # Plans keep the blocks of some prompts on the one side, of others on the other.
        usages = [(await client.generate([first, *PROMPT], **asked)).usage for first in range(1, 5)]
    assert [(each.num_pinned_tokens, each.num_refused_pin_tokens) for each in usages] == [(200, 0)] * 4


@pytest.mark.asyncio
async def test_marks_beyond_the_quota_are_counted_as_refused_and_told_as_written() -> None:
    async with serving(cache_gib=10 * 8 * BLOCK_SIZE / 2**30) as served:
        half = await generate(served, PROMPT, CacheMark(ttl_s=60))
    async with serving(cache_gib=0.0) as served:
        none = await generate(served, PROMPT, CacheMark(ttl_s=60))
    assert told(half) == told(none) == (0, (CacheWrite(ttl_s=60, num_tokens=196),))
    assert (half.usage.num_pinned_tokens, half.usage.num_refused_pin_tokens) == (40, 156)
    assert (none.usage.num_pinned_tokens, none.usage.num_refused_pin_tokens) == (0, 196)


@pytest.mark.asyncio
async def test_what_one_tenant_marks_and_sends_changes_no_count_of_another() -> None:
    marks = CacheMark(ttl_s=3600), CacheMark(ttl_s=60, num_tokens=50)
    async with serving() as served:
        alone = [told(await generate(served, PROMPT, *marks, tenant="b")) for _ in range(2)]
    async with serving() as served:
        for _ in range(2):
            await generate(served, PROMPT, *marks)
        beside = [told(await generate(served, PROMPT, *marks, tenant="b")) for _ in range(2)]
    assert alone == beside
