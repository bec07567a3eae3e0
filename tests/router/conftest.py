"""Running clusters."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.router.fakes import TestCluster, pair, running_cluster


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    """A router in front of a prefill and a decode worker."""
    async with running_cluster(*pair()) as running:
        yield running
