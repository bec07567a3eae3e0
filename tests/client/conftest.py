from collections.abc import Iterator

import pytest

from tests.client.fake_server import FakeInference, serving


@pytest.fixture
def fake() -> FakeInference:
    return FakeInference()


@pytest.fixture
def address(fake: FakeInference) -> Iterator[str]:
    with serving(fake) as bound:
        yield bound
