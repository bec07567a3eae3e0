"""Engine tests compute on one thread: parallel runs must not compete for cores, and sums keep their order."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save("qwen3", tmp_path_factory)


@pytest.fixture(scope="session")
def mixed_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose layers have a window, none, and a window."""
    return _save("qwen3-layer-types", tmp_path_factory)


def _save(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.tiny_models import make_model  # seconds, which most engine tests save

    model_dir = tmp_path_factory.mktemp(name)
    make_model(name).save_pretrained(model_dir)
    return model_dir
