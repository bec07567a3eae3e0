import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import pytest

from kvrelay.client import AsyncClient, Client
from tests.client.fake_server import FakeInference, serving

Connect = Callable[..., Any]
"""Makes a client that is used like `Client`."""


class DrivenStream:
    """An asyncio stream, used like the blocking one."""

    def __init__(self, runner: asyncio.Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            return await anext(self._stream, None)

        if (item := self._runner.run(step())) is None:
            raise StopIteration
        return item

    def result(self) -> Any:
        return self._runner.run(self._stream.result())

    def close(self) -> None:
        self._runner.run(self._stream.aclose())

    def __enter__(self) -> Self:
        self._runner.run(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class DrivenClient:
    """`AsyncClient`, used like `Client`: its event loop runs during each call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            result = getattr(self._client, name)(*args, **options)
            return DrivenStream(self._runner, result) if isinstance(result, AsyncIterator) else await result

        return lambda *args, **options: self._runner.run(call(*args, **options))

    @property
    def address(self) -> str:
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


@pytest.fixture(params=[Client, DrivenClient], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Connect:
    chosen: Connect = request.param
    return chosen


@pytest.fixture
def client(connect: Connect, address: str) -> Iterator[Any]:
    with connect(address) as made:
        yield made


@pytest.fixture
def fake() -> FakeInference:
    return FakeInference()


@pytest.fixture
def address(fake: FakeInference) -> Iterator[str]:
    with serving(fake) as bound:
        yield bound
