"""Engine tests compute on one thread: several at once must not fight over the cores, and sums keep their order."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
