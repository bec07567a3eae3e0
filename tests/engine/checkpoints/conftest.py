"""These tests judge the weights that are read: without compiled kernels, inputs stay as they are."""

import pytest


@pytest.fixture(autouse=True)
def _exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ops.select.RoundedInputs", lambda projection, _span: projection)
