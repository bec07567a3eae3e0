"""Invariant 6: nothing that a tenant gets back depends on what another tenant has sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common.config import parse_config
from kvrelay.client import AsyncClient, Generation
from tests.served_router import serving_router
from tests.worker.cluster import Pool, running_pool

KEYS = {name: f"key-of-tenant-{name}-0001" for name in ("a", "b", "friend")}
WORKERS: dict[str, dict[str, Any]] = {"prefill-0": {}, "decode-0": {}}
PROMPT = [number % 199 + 1 for number in range(400)]
COLD = [number % 197 + 2 for number in range(400)]


@asynccontextmanager
async def running_router(pool: Pool, **tenants: dict[str, Any]) -> AsyncIterator[str]:
    """Start a router over both workers and return its address, once they are ready."""
    raw = {
        "router": {"auth": "api_key", "salt_secret": "s" * 32, "local_prefill_max_tokens": 0, "metrics_port": None},
        "tenants": [{"name": name, "api_keys": [KEYS[name]], **fields} for name, fields in tenants.items()],
    }
    async with serving_router(parse_config(raw, source="test")) as served:
        await served.until_used(pool.endpoints)
        yield served.address


async def ask(address: str, tenant: str, prompt: list[int]) -> Generation:
    async with AsyncClient(address, api_key=KEYS[tenant], timeout_s=60) as client:
        return await client.generate(prompt, max_tokens=4, temperature=0)


def seen(generation: Generation) -> tuple[int, int, int]:
    """Everything that a client is told about caches."""
    usage = generation.usage
    return usage.num_cached_tokens, usage.num_decode_cached_tokens, generation.plans[0].predicted_cached_tokens


async def test_prompt_that_another_tenant_has_cached_is_as_cold_as_one_that_nobody_has() -> None:
    async with running_pool(WORKERS) as pool, running_router(pool, a={}, b={}) as address:
        first = await ask(address, "a", PROMPT)
        warm = await ask(address, "a", PROMPT)
        other = await ask(address, "b", PROMPT)
        cold = await ask(address, "b", COLD)
    assert min(seen(warm)) > 380
    assert seen(first) == seen(other) == seen(cold) == (0, 0, 0)
    assert first.samples[0].token_ids == warm.samples[0].token_ids == other.samples[0].token_ids
    # What is transferred tells nothing either.
    assert first.transfer.num_blocks == other.transfer.num_blocks == cold.transfer.num_blocks > warm.transfer.num_blocks


async def test_tenants_that_agreed_to_share_find_each_others_prefixes() -> None:
    async with (
        running_pool(WORKERS) as pool,
        running_router(pool, a={"share_cache": True}, friend={"share_cache": True}, b={}) as address,
    ):
        await ask(address, "a", PROMPT)
        shared = await ask(address, "friend", PROMPT)
        other = await ask(address, "b", PROMPT)
    assert min(seen(shared)) > 380
    assert seen(other) == (0, 0, 0)
