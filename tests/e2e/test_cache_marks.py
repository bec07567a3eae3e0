"""Marks of prompts, from a door to the workers' pages and back: pinned, counted, and no other tenant's business."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from tests.builders import BLOCK_SIZE
from tests.e2e.in_process import System, running_system

KEYS = {name: f"key-of-tenant-{name}-0001" for name in ("a", "b")}
SYSTEM = "You know the whole library by heart. " * 8
ASKED = "Which book? " * 4
HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
BOTH_KEEP: dict[str, Any] = {"local_prefill_max_tokens": 0}


@asynccontextmanager
async def serving(router: dict[str, Any] = BOTH_KEEP, *, cache_gib: float = 1.0, **fake: Any) -> AsyncIterator[System]:
    tenants = [{"name": name, "api_keys": [key], "cache_gib": cache_gib} for name, key in KEYS.items()]
    options = router | {"http_port": 0}
    async with running_system(router=options, tenants=tenants, **({"num_blocks": 400} | fake)) as served:
        yield served


async def ask(served: System, tenant: str = "a", **fields: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{served.router.http_port}"
    body = {"max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "Which book?"}], **fields}
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
        response = await http.post("/v1/messages", json=body, headers={"x-api-key": KEYS[tenant]})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


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
