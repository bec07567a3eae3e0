"""Running clusters with the HTTP API."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.router.fakes import pair
from tests.router.http.clients import HttpCluster, http_cluster


@pytest_asyncio.fixture
async def http() -> AsyncIterator[HttpCluster]:
    """A router with the HTTP API in front of a prefill and a decode worker."""
    async with http_cluster(*pair()) as running:
        yield running
