"""The device executor over Triton's kernels: on a GPU by graphs, else in the interpreter."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.cuda.loading import LoadedModel
from engine.kv_cache import TorchKvStore
from engine.ops.triton_kernels.ops import TritonOps
from tests.engine.cuda.support import OverlapDriver, load_device
from tests.engine.tiny_models import Driver, load, make_prompt, make_sequence


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_ops(model: LoadedModel, store: TorchKvStore) -> TritonOps:
        return TritonOps(model.decoder.config, store, max_positions=model.info.max_model_len)

    monkeypatch.setattr("engine.cuda.loading.make_device_ops", make_ops)


@pytest.mark.parametrize("max_running", [2, 5])
def test_launch_over_kernels_and_pages_full_of_nan_equals_the_other_executor(qwen3: Path, max_running: int) -> None:
    prompts = [make_prompt(num, seed=num) for num in (9, 4, 6)]
    expected = Driver(load(qwen3)).generate([make_sequence(p) for p in prompts], num_tokens=5)
    executor = load_device(qwen3, max_running=max_running, num_blocks=16)
    assert isinstance(executor.kv, TorchKvStore)
    for pages in executor.kv.layers:
        for page in pages:
            page.fill_(float("nan"))
    driver = OverlapDriver(executor)
    assert driver.generate([make_sequence(p) for p in prompts], num_tokens=5, chunk_size=7) == expected
    assert driver.num_overlapped >= 9
