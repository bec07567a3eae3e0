"""Kernels run on a GPU where there is one, else in Triton's interpreter (see tests/conftest.py)."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.triton_interpreter import patched_once

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="package")
def _patched_once() -> Iterator[None]:
    with patched_once():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    from engine.device.interpreter import is_interpreted

    if torch.cuda.is_available() and not is_interpreted():
        return torch.device("cuda")
    if not is_interpreted():
        pytest.skip("no GPU for torch, and triton was imported without TRITON_INTERPRET=1")
    return torch.device("cpu")
