"""Engine tests compute on one thread: parallel runs must not compete for cores, and sums keep their order."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _rates(rates_measured_once: None) -> None:
    pass


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks, in tests of what they compute."""
    from tests.engine.forked_ranks import ForkedRank

    monkeypatch.setattr(
        "engine.ranks.leader.subprocess",
        SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired),
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a tiny model's name to its checkpoint folder, which tests leave as it is."""

    @functools.cache
    def save(name: str) -> Path:
        from tests.engine.tiny_models import make_model  # seconds, which most engine tests save

        model_dir = tmp_path_factory.mktemp(name)
        make_model(name).save_pretrained(model_dir)
        return model_dir

    return save


@pytest.fixture(scope="session")
def qwen3(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="session")
def mixed_windows(checkpoint: Callable[[str], Path]) -> Path:
    """Return a checkpoint whose first layer has a window and whose second has none."""
    return checkpoint("qwen3-layer-types")
