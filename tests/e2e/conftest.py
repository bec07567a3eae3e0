"""One router with an HTTP door in front of a prefill and a decode worker, for all tests of a module that ask for it."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from kvrelay.client import AsyncClient
    from tests.e2e.in_process import System


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing() -> "AsyncIterator[tuple[System, AsyncOpenAI]]":
    from tests.e2e.doors import both_doors  # takes a second to import, in most files for nothing

    async with both_doors() as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def system(standing: "tuple[System, AsyncOpenAI]") -> "AsyncIterator[System]":
    """The system; a test leaves nothing behind in it but what is cached."""
    yield standing[0]
    await standing[0].until_idle()


@pytest_asyncio.fixture(loop_scope="module")
async def openai(system: "System", standing: "tuple[System, AsyncOpenAI]") -> "AsyncOpenAI":
    """OpenAI's client of its HTTP door."""
    return standing[1]


@pytest_asyncio.fixture(name="grpc", loop_scope="module")
async def grpc_client(system: "System") -> "AsyncIterator[AsyncClient]":
    async with system.client() as client:
        yield client
