"""Workers with fake engines behind a router with both of its doors, all in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.in_process import System, running_system


@asynccontextmanager
async def both_doors(**options: Any) -> AsyncIterator[tuple[System, AsyncOpenAI]]:
    """Yield a system that ends empty, and OpenAI's client of its HTTP door; `options` are those of the system."""
    async with running_system(router={"http_port": 0}, **({"num_blocks": 400} | options)) as system:
        base_url = f"http://127.0.0.1:{system.router.http_port}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="sk-any", max_retries=0) as openai:
            yield system, openai
            await system.until_idle()
