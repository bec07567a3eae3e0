"""Several ranks that launch steps on devices of their own, on CPUs through gloo: against one device."""

import gc
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from common.errors import LayoutMismatch
from common.ids import BlockId
from engine.cuda.executor import CudaExecutor
from engine.cuda.ranks import load_ranks
from engine.options import EngineOptions, ModelDescription
from engine.ranks.group import DeviceGroup
from engine.weights.config import UnsupportedModel
from engine.weights.ranks import Rank
from tests.engine.driver import DEVICE, Driver, load_device, make_sequence
from tests.engine.test_ranks import BLOCK_SIZE, pages_of, save, sequences
from tests.engine.tiny_models import make_prompt

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks need a card each")

NUM_TOKENS = 10


def options_for(folder: Path, num_ranks: int) -> EngineOptions:
    return EngineOptions(
        model_dir=folder,
        model_name="tiny",
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=128,
        max_step_tokens=64,
        max_running=8,
        tensor_parallel=num_ranks,
    )


def load_device_ranks(folder: Path, num_ranks: int) -> CudaExecutor:
    """Return the executor of the first of several ranks."""
    options = options_for(folder, num_ranks)
    return load_ranks(ModelDescription.read(options), options)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "sizes", "num_ranks"),
    [
        # a key head that two ranks have, and 131 tokens, which no number of ranks divides
        ("llama-tied", {"num_key_value_heads": 2, "attention_bias": True}, 4),
        (
            "qwen2_moe",
            {"num_key_value_heads": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
            2,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_steps_of_ranks_on_devices_give_the_answers_and_nearly_the_pages_of_one(
    tmp_path: Path, name: str, sizes: dict[str, Any], num_ranks: int
) -> None:
    save(tmp_path, name, **sizes)
    found: list[tuple[list[list[int]], list[bytes]]] = []
    for executor in (load_device_ranks(tmp_path, num_ranks), load_device(tmp_path, block_size=BLOCK_SIZE)):
        driver, asked = Driver(executor), sequences()
        answers = driver.generate(asked, num_tokens=NUM_TOKENS, chunk_size=20)
        assert driver.num_overlapped
        found.append((answers, [pages_of(executor, each) for each in asked]))
    (answers, pages), (expected, their_pages) = found
    assert answers == expected
    for ours, theirs in zip(pages, their_pages, strict=True):
        ranks, device = (np.frombuffer(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(ranks, device, rtol=1e-3, atol=1e-5)


def test_pages_of_one_device_go_on_in_two_ranks_after_they_were_copied_there(tmp_path: Path) -> None:
    save(tmp_path, "llama", num_key_value_heads=4)
    one, two = load_device(tmp_path, block_size=BLOCK_SIZE), load_device_ranks(tmp_path, 2)
    assert two.kv.shape == one.kv.shape
    prompt = make_prompt(2 * BLOCK_SIZE + 3, seed=3)
    asked = make_sequence(prompt, block_size=BLOCK_SIZE)
    [expected] = Driver(one).generate([asked], num_tokens=NUM_TOKENS)
    data = one.kv.read_blocks([BlockId(asked.block_table[i]) for i in range(2)])
    driver, resumed = Driver(two, seed=1), make_sequence(prompt, block_size=BLOCK_SIZE)
    written, held = ([driver.free.pop() for _ in range(2)] for _ in range(2))
    two.kv.write_blocks(written, data)
    assert two.kv.read_blocks(written) == data
    for source, target in zip(written, held, strict=True):
        two.kv.copy_block(source, target)
    resumed.block_table.extend(held)
    resumed.num_computed = 2 * BLOCK_SIZE
    assert driver.generate([resumed], num_tokens=NUM_TOKENS) == [expected]
    with pytest.raises(LayoutMismatch):
        two.kv.read_blocks([BlockId(128)])


def test_ranks_with_pages_of_fp8_or_without_a_card_each_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(save(tmp_path, "llama", num_key_value_heads=4), 2)
    model = ModelDescription.read(options)
    with pytest.raises(UnsupportedModel, match="fp8 among ranks"):
        load_ranks(model, replace(options, kv_dtype="fp8"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedModel, match="sees 1; set pools"):
        load_ranks(replace(model, device=torch.device("cuda")), options)


def test_ranks_on_cards_ask_nccl_for_each_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = MagicMock()
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    group = DeviceGroup(Rank(idx=1, size=2), torch.device("cuda"), os.memfd_create("ranks"))
    group.meet()
    assert nccl.call_args.args[1:3] == (1, 2)
    sums = torch.ones(2, 3)
    assert group.add_up(sums) is group.broadcast(sums) is sums
    assert group.gather(sums).shape == (2, 2, 3)
    called = [call[0] for call in nccl.return_value.method_calls]
    assert called == ["allreduce", "broadcast", "_allgather_base"]


def test_store_of_ranks_that_outlives_them_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Any] = []
    monkeypatch.setattr(DeviceGroup, "_join", lambda _self, store, *_: stores.append(store))
    DeviceGroup(Rank(idx=0, size=2), torch.device("cpu")).meet()
    gc.collect()
    with ExitStack() as opened:  # also under the lowest number that is free
        files = [opened.enter_context((tmp_path / str(i)).open("wb+")) for i in range(8)]
        stores.clear()
        gc.collect()
        assert [file.read() for file in files] == [b""] * len(files)
