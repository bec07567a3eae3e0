"""Keys and values in 8 and 4 bits: formats, pages, whole models, and blocks that move from one engine to another."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import BlockId
from engine.kv_store import KvShape
from engine.options import EngineOptions, ModelDescription
from engine.pages.kv_cache import TorchKvStore
from engine.pages.kv_format import KvDtype, kv_format
from engine.weights.config import UnsupportedModel
from engine.weights.quantize import FP8
from tests.engine.driver import Driver, load, make_sequence
from tests.engine.tiny_models import make_model, make_prompt

CODED: tuple[KvDtype, ...] = ("int8", "int4")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with heads of 32, windows in some layers, and norms of queries and keys."""
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3-layer-types", hidden_size=192, head_dim=32).save_pretrained(folder)
    return folder


@settings(max_examples=40, deadline=None)
@given(
    kv_dtype=st.sampled_from(CODED),
    seed=st.integers(0, 1000),
    exponent=st.integers(-30, 30),
    head_dim=st.sampled_from([32, 96]),
)
def test_values_are_read_back_within_half_a_step_of_the_grid(
    kv_dtype: KvDtype, seed: int, exponent: int, head_dim: int
) -> None:
    pages = kv_format(kv_dtype, torch.float32)
    x = torch.randn(5, 2, head_dim, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = pages.encode(x)
    found = pages.decode(codes, scales, torch.float32)
    expected = pages.mix(x)
    steps = scales.float().abs().repeat_interleave(head_dim // scales.shape[-1], -1)
    # The far end of int4's range, where +8 is missing, is a whole step away.
    assert bool(((found - expected).abs() <= steps * (0.51 if kv_dtype == "int8" else 1.05)).all())
    torch.testing.assert_close(pages.mix(expected), x, rtol=1e-4, atol=1e-6 * 2.0**exponent)
    assert codes.nbytes + scales.nbytes == 10 * pages.row_bytes(head_dim)


@pytest.mark.parametrize("kv_dtype", CODED)
def test_value_that_is_not_finite_stays_so(kv_dtype: KvDtype) -> None:
    pages = kv_format(kv_dtype, torch.float32)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(1, 1, 32)
        x[0, 0, 3] = bad
        assert not pages.decode(*pages.encode(x), torch.float32).isfinite().any()


def test_block_with_heads_of_64_takes_half_and_a_quarter_of_bfloat16s_bytes() -> None:
    assert [kv_format(name, torch.bfloat16).row_bytes(64) for name in ("auto", "fp8", *CODED)] == [128, 64, 66, 36]


def test_kv_dtype_means_a_format() -> None:
    assert kv_format("auto", torch.float16).dtype is torch.float16
    assert kv_format("fp8", torch.bfloat16).dtype is FP8
    assert not kv_format("fp8", torch.bfloat16).has_codes
    assert all(kv_format(name, torch.bfloat16).has_codes for name in CODED)


@pytest.mark.parametrize("kv_dtype", CODED)
def test_blocks_of_codes_travel_with_their_scales(kv_dtype: KvDtype) -> None:
    row_bytes = kv_format(kv_dtype, torch.bfloat16).row_bytes(32)
    shape = KvShape(
        num_layers=3,
        num_kv_heads=2,
        head_dim=32,
        block_size=16,
        dtype=kv_dtype,
        row_bytes=row_bytes,
        fingerprint="test",
    )
    source, target = TorchKvStore(shape, 4, device=CPU), TorchKvStore(shape, 4, device=CPU)
    for layer in source.layers:
        for pages in layer:
            pages.random_(0, 256)
    data = bytes(source.read_blocks([BlockId(2), BlockId(0)]))
    assert len(data) == 2 * 3 * 2 * 16 * 2 * row_bytes
    target.write_blocks([BlockId(1), BlockId(3)], memoryview(data))
    target.copy_block(BlockId(3), BlockId(0))
    target.clear_blocks([BlockId(1)])
    assert bytes(target.read_blocks([BlockId(0)])) == data[len(data) // 2 :]
    assert not any(target.read_blocks([BlockId(1)]))


@pytest.mark.parametrize(
    ("kv_dtype", "kernels"),
    [
        *itertools.product(CODED, [("auto", "auto"), ("torch", "torch")]),
        *(("auto", kernels) for kernels in itertools.product(("auto", "torch"), repeat=2)),
    ],
)
def test_answer_continues_on_the_pages_of_another_engine(
    model_dir: Path, kv_dtype: KvDtype, kernels: tuple[str, str]
) -> None:
    """A decode worker goes on with the blocks of a prefill worker, whichever of the two has a compiler."""
    prompt = make_prompt(45)
    options = {"kv_dtype": kv_dtype, "block_size": 16, "num_blocks": 12}
    prefill, decode = (load(model_dir, kernels=each, **options) for each in kernels)
    assert prefill.kv.shape == decode.kv.shape
    local = make_sequence(prompt, block_size=16)
    [expected] = Driver(prefill).generate([local], num_tokens=12)
    moved, driver = make_sequence(prompt, block_size=16), Driver(decode, seed=5)
    driver.generate([moved], num_tokens=1)  # takes pages, whose content is then replaced
    assert isinstance(decode.kv, TorchKvStore)
    decode.kv.clear_blocks(list(map(BlockId, moved.block_table)))
    for first in (0, decode.kv.num_blocks):  # blocks, then their window pages
        targets = [BlockId(first + i) for i in moved.block_table]
        sources = [BlockId(first + i) for i in local.block_table[: len(targets)]]
        decode.kv.write_blocks(targets, prefill.kv.read_blocks(sources))
    [found] = driver.generate([moved], num_tokens=12)
    assert found == expected


@pytest.mark.parametrize("kv_dtype", CODED)
def test_answer_is_the_same_alone_in_a_batch_and_in_chunks(model_dir: Path, kv_dtype: KvDtype) -> None:
    prompts = [make_prompt(num, seed=num) for num in (9, 40, 70)]
    executor = load(model_dir, kv_dtype=kv_dtype, block_size=16, num_blocks=40)

    def answers(*prompts: tuple[int, ...], chunk_size: int) -> list[list[int]]:
        sequences = [make_sequence(prompt, block_size=16) for prompt in prompts]
        return Driver(executor).generate(sequences, num_tokens=10, chunk_size=chunk_size)

    alone = [answers(prompt, chunk_size=100)[0] for prompt in prompts]
    assert answers(*prompts, chunk_size=100) == alone
    assert answers(*prompts, chunk_size=23) == alone


def test_transformers_models_refuse_kv_dtype_by_name(tmp_path: Path) -> None:
    make_model("olmo").save_pretrained(tmp_path)
    options = EngineOptions(model_dir=tmp_path, model_name="tiny", device="cpu", kv_dtype="int8")
    with pytest.raises(UnsupportedModel, match="kv_dtype"):
        ModelDescription.read(options)
