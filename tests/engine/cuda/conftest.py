"""Checkpoints that several modules use."""

from pathlib import Path

import pytest

from tests.engine.tiny_models import make_model


@pytest.fixture(scope="package")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save("qwen3", tmp_path_factory)


@pytest.fixture(scope="package")
def mixed_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save("qwen3-layer-types", tmp_path_factory)


def _save(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp(name)
    make_model(name).save_pretrained(model_dir)
    return model_dir
