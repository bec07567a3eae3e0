"""Tests of `model.engine: vllm` need vLLM beside kvrelay: `make test-vllm` runs them in a venv of its own."""

from pathlib import Path

import pytest

from common.engines import VLLM_VERSION, installed_package, vllm_version
from tests.short_model import write_short_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_version(installed_package) != VLLM_VERSION:
        skip = pytest.mark.skip(reason=f"vLLM {VLLM_VERSION} is not installed here: run `make test-vllm`")
        for item in items:
            if "tests/vllm/" in item.nodeid:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def short_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_model(tmp_path_factory.mktemp("short-model"))
