"""Settings of the tests of workers."""

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give pulls all the time that a busy machine needs; by default they are given up after a quarter of a second."""
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 60.0)
