"""Among how many ranks a decoder can be cut, from its config.json alone, and in which segments its sums are added up.

A launcher asks before it starts anything, the engine while it loads.
"""

from math import gcd
from pathlib import Path

from engine.weights.config import DecoderConfig, UnsupportedModel, is_native, parse_config, read_json

_KEY = "pools.*.tensor_parallel"
_MOST_SEGMENTS = 12
_UNIT = 32
"""Values of a segment are a multiple of this, the depth that a tile register takes."""


def num_segments(config: DecoderConfig) -> int:
    """Return the segments of products whose inputs may be cut. Ranks have equal numbers of them."""
    experts = config.experts
    if config.recurrent is not None or config.latent is not None or config.lone_layers:
        return 1
    if experts is not None and experts.has_bias:
        return 1
    sizes = {config.attended_size, *config.gated_sizes}
    if any(size % _UNIT for size in sizes):
        return 1
    return gcd(_MOST_SEGMENTS, config.num_heads, *(size // _UNIT for size in sizes))


def possible_ranks(config: DecoderConfig) -> list[int]:
    """Return the numbers of ranks among which a decoder can be cut."""
    segments, heads = num_segments(config), config.num_kv_heads
    counts = [count for count in range(1, segments + 1) if not segments % count]
    return [count for count in counts if not heads % count or not count % heads]


def check_ranks(config: DecoderConfig | None, num_ranks: int, *, is_quantized: bool = False) -> None:
    """Raise UnsupportedModel unless so many ranks can compute a model, naming the numbers that can.

    `config`: None where transformers computes.
    """
    if num_ranks == 1:
        return
    if config is None:
        raise UnsupportedModel("cannot cut what transformers computes among ranks; set model.engine: vllm", key=_KEY)
    if is_quantized:
        raise UnsupportedModel("cannot cut quantized weights among ranks; choose plain ones", key=_KEY)
    if num_ranks not in (possible := possible_ranks(config)):
        raise UnsupportedModel(
            f"cannot cut this model among {num_ranks} ranks: its {config.num_heads} heads, {config.num_kv_heads}"
            f" key heads and inner sizes allow {', '.join(map(str, possible))}",
            key=_KEY,
        )


def check_ranks_of(model_dir: Path, num_ranks: int, *, is_quantized: bool) -> None:
    """Raise UnsupportedModel as `check_ranks` does, for a checkpoint; a lone GGUF file is left to the engine."""
    path = model_dir / "config.json"
    if num_ranks > 1 and path.exists():
        raw = read_json(path)
        # Recurrent layers, which decide between the two devices, are never cut.
        config = parse_config(raw) if is_native(raw, "cpu") else None
        check_ranks(config, num_ranks, is_quantized=is_quantized)
