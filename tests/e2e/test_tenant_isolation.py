"""Invariant 6: nothing that a tenant gets back depends on what another tenant has sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import AccessDenied, Unauthenticated
from kvrelay.client import Generation
from tests.e2e.in_process import System, running_system

KEYS = {name: f"key-of-tenant-{name}-0001" for name in ("a", "b", "friend")}
PROMPT = [number % 199 + 1 for number in range(400)]
COLD = [number % 197 + 2 for number in range(400)]


@asynccontextmanager
async def serving(**tenants: dict[str, Any]) -> AsyncIterator[System]:
    """Run a system that serves these tenants."""
    known = [{"name": name, "api_keys": [KEYS[name]], **fields} for name, fields in tenants.items()]
    async with running_system(router={"local_prefill_max_tokens": 0}, tenants=known, num_blocks=400) as system:
        yield system


async def ask(system: System, tenant: str, prompt: list[int]) -> Generation:
    async with system.client(api_key=KEYS[tenant]) as client:
        return await client.generate(prompt, max_tokens=4, temperature=0)


def seen(generation: Generation) -> tuple[int, int, int]:
    """Everything that a client is told about caches."""
    usage = generation.usage
    return usage.num_cached_tokens, usage.num_decode_cached_tokens, generation.plans[0].predicted_cached_tokens


async def test_prompt_that_another_tenant_has_cached_is_as_cold_as_one_that_nobody_has() -> None:
    async with serving(a={}, b={}) as system:
        first = await ask(system, "a", PROMPT)
        warm = await ask(system, "a", PROMPT)
        other = await ask(system, "b", PROMPT)
        cold = await ask(system, "b", COLD)
    assert min(seen(warm)) > 380
    assert seen(first) == seen(other) == seen(cold) == (0, 0, 0)
    assert first.samples[0].token_ids == warm.samples[0].token_ids == other.samples[0].token_ids
    # What is transferred tells nothing either.
    assert first.transfer.num_blocks == other.transfer.num_blocks == cold.transfer.num_blocks > warm.transfer.num_blocks


async def test_tenants_that_agreed_to_share_find_each_others_prefixes() -> None:
    async with serving(a={"share_cache": True}, friend={"share_cache": True}, b={}) as system:
        await ask(system, "a", PROMPT)
        shared = await ask(system, "friend", PROMPT)
        other = await ask(system, "b", PROMPT)
    assert min(seen(shared)) > 380
    assert seen(other) == (0, 0, 0)


async def test_status_of_the_cluster_is_for_operators_who_may_not_generate() -> None:
    async with serving(a={}, friend={"operator": True}) as system:
        for key, error in ((None, Unauthenticated), ("an-unknown-key", Unauthenticated), (KEYS["a"], AccessDenied)):
            async with system.client(api_key=key) as client:
                with pytest.raises(error):
                    await client.status()
        async with system.client(api_key=KEYS["friend"]) as tenant, system.operator() as operator:
            for client in (tenant, operator):
                assert len((await client.status()).workers) == 2
            with pytest.raises(Unauthenticated):  # its proof shows the whole cluster
                await operator.generate("hello")
