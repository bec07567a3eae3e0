"""Running clusters, and what holds still while a test runs."""

import gc
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from router.placement.limits import TokenBucket
from tests.router.fake_worker import pair
from tests.router.fakes import TestCluster, running_cluster


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    """A router in front of a prefill and a decode worker."""
    async with running_cluster(*pair()) as running:
        yield running


@pytest.fixture
def no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates bring nothing back while a test runs, however long it takes."""
    monkeypatch.setattr(TokenBucket, "_fill", lambda _bucket, _now_s: None)


@pytest.fixture
def no_collecting() -> Iterator[None]:
    """No garbage is collected while a test runs: what is in a reference cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
