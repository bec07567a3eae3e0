"""Running clusters with the HTTP API."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.router.fake_worker import pair
from tests.router.http.clients import HttpCluster, http_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_http() -> AsyncIterator[HttpCluster]:
    """The same for all tests of a module with `loop_scope="module"`, which leave it as it was."""
    async with http_cluster(*pair()) as running:
        yield running


@pytest_asyncio.fixture
async def http() -> AsyncIterator[HttpCluster]:
    """A router with the HTTP API in front of a prefill and a decode worker."""
    async with http_cluster(*pair()) as running:
        yield running
