from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.timing import StepShape
from measure.simulate.roofline import MODELS, Roofline, UnknownHardware
from measure.simulate.timing import KvSize, TimingFileError, WindowPageSize, read_timing, write_timing

PRESETS = [("llama-70b", "h100-tp4"), ("llama-70b", "h200-tp4"), ("qwen3-8b", "h100")]
LLAMA = Roofline.preset("llama-70b", "h100-tp4")


def prefill_shape(num_tokens: int, *, num_cached: int = 0) -> StepShape:
    pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
    return StepShape(num_prefill_tokens=num_tokens, num_prefill_pairs=pairs)


@pytest.mark.parametrize(("name", "billions"), [("llama-70b", 70.55), ("qwen3-8b", 8.19)])
def test_model_has_the_parameters_that_its_card_states(name: str, billions: float) -> None:
    model = MODELS[name]
    embedding = model.num_head_weights  # both models have one beside the head
    assert (model.num_layer_weights + model.num_head_weights + embedding) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_lone_decode_step_is_bound_by_reading_the_weights() -> None:
    weights_s = 2 * (68.451e9 + 1.0507e9) / (4 * 3.35e12 * 0.75)
    assert LLAMA.step_s(StepShape(num_decodes=1)) == pytest.approx(3e-3 + weights_s, rel=1e-3)
    assert 0.015 < LLAMA.step_s(StepShape(num_decodes=1, num_context_tokens=1000)) < 0.020


def test_large_prefill_step_is_bound_by_arithmetic() -> None:
    products_s = 2 * 68.451e9 * 8192 / (4 * 989e12 * 0.5)
    attention_s = 4 * 80 * 8192 * (8192 * 8193 / 2) / (4 * 989e12 * 0.5)
    all_reduce_s = 2 * 80 * 8192 * 8192 * 2 * 1.5 / (450e9 * 0.75)
    expected = 3e-3 + products_s + attention_s + all_reduce_s
    assert LLAMA.step_s(prefill_shape(8192)) == pytest.approx(expected, rel=1e-3)
    assert 0.6 < expected < 0.8


@pytest.mark.parametrize(("model", "device"), PRESETS)
@given(
    tokens=st.integers(0, 8192),
    cached=st.integers(0, 65_536),
    decodes=st.integers(1, 128),
    context=st.integers(0, 10**6),
)
def test_more_work_never_takes_less_time(
    model: str, device: str, tokens: int, cached: int, decodes: int, context: int
) -> None:
    roofline = Roofline.preset(model, device)

    def step_s(tokens: int, cached: int, decodes: int, context: int) -> float:
        chunk = prefill_shape(tokens, num_cached=cached)
        return roofline.step_s(
            StepShape(
                num_prefill_tokens=tokens,
                num_prefill_pairs=chunk.num_prefill_pairs,
                num_decodes=decodes,
                num_context_tokens=context,
            )
        )

    less = step_s(tokens, cached, decodes, context)
    assert less <= step_s(tokens + 100, cached, decodes, context)
    assert less <= step_s(tokens, cached + 100, decodes, context)
    assert less <= step_s(tokens, cached, decodes + 1, context)
    assert less < step_s(tokens, cached, decodes, context + 1000)


@pytest.mark.parametrize("num_decodes", [1, 7, 128])
def test_decode_line_gives_the_time_of_a_step(num_decodes: int) -> None:
    fixed_s, per_token_s = LLAMA.decode_line(num_decodes)
    step = StepShape(num_decodes=num_decodes, num_context_tokens=12_345)
    assert fixed_s + 12_345 * per_token_s == pytest.approx(LLAMA.step_s(step))


@pytest.mark.parametrize(("model", "device"), PRESETS)
@pytest.mark.parametrize(
    "shape",
    [
        prefill_shape(2048),
        prefill_shape(1500, num_cached=30_000),
        StepShape(num_prefill_tokens=900, num_prefill_pairs=10**7, num_decodes=20, num_context_tokens=90_000),
        StepShape(num_decodes=48, num_context_tokens=300_000),
        StepShape(num_decodes=1, num_context_tokens=100),
    ],
)
def test_linearized_model_is_near_the_roofline(model: str, device: str, shape: StepShape) -> None:
    roofline = Roofline.preset(model, device)
    timing = roofline.linearized(max_step_tokens=2048)
    assert timing.step_s(shape) == pytest.approx(roofline.step_s(shape), rel=0.02)


@pytest.mark.parametrize("max_step_tokens", [1, 64, 512, 8192])
def test_linearized_model_has_no_negative_weight_at_any_budget(max_step_tokens: int) -> None:
    timing = LLAMA.linearized(max_step_tokens=max_step_tokens)
    for step in (timing.prefill, timing.decode):
        assert min(step.constant_s, step.per_prefill_token_s, step.per_prefill_pair_s) >= 0
        assert min(step.per_decode_s, step.per_context_token_s) >= 0
    assert timing.max_step_tokens == max_step_tokens


def test_group_pulls_through_all_its_nics() -> None:
    assert LLAMA.link.bytes_per_s == 4 * 50e9 * 0.75
    assert LLAMA.linearized(max_step_tokens=512).pull_s(None, 1.5e9) == pytest.approx(2e-3 + 0.01)


@pytest.mark.parametrize(("model", "device"), [("llama-70b", "abacus"), ("llama", "h100")])
def test_unknown_model_or_device_is_refused_with_the_known_ones(model: str, device: str) -> None:
    with pytest.raises(UnknownHardware, match=r"is not known; say one of (llama-70b, qwen3-8b|h100, h100-tp4, h2)"):
        Roofline.preset(model, device)


def test_written_model_reads_back_as_it_was(tmp_path: Path) -> None:
    timing = Roofline.preset("qwen3-8b", "h100").linearized(max_step_tokens=512)
    for windows in (None, WindowPageSize(num_tokens=512, page_bytes=245_760)):
        kv = KvSize(bytes_per_token=147_456, windows=windows)
        write_timing(tmp_path / "t.json", timing, kv)
        assert read_timing(tmp_path / "t.json") == (timing, kv)


def test_routers_predict_by_a_model_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(
        '{"prefill": {"constant_s": 0.03}, "decode": {"constant_s": 0.02}, "max_step_tokens": 512,'
        ' "link": {"latency_s": 0.007, "bytes_per_s": 3e9}, "kv_bytes_per_token": 23040}'
    )
    timing, _ = read_timing(tmp_path / "t.json")
    assert timing.prefill.is_measured
    assert timing.decode.is_measured


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Invalid JSON"),
        ('{"prefill": {"constant_s": -1}}', "prefill.constant_s: Input should be greater than or equal to 0"),
        ('{"prefill": {"constant_s": 1}, "decode": {"constant_s": 1, "speed": 3}}', "decode.speed: Extra inputs"),
    ],
)
def test_bad_file_is_refused_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TimingFileError) as caught:
        read_timing(path)
    assert str(caught.value).startswith(f"{path}: {complaint}")
