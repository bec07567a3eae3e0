"""The machine's bound: measured rates of memory and of matrix products, and the work that a case needs.

On a shared host both change from minute to minute, memory by a factor of two: they are measured before every case, and
a case is held against its own.

No engine can be faster than its bytes through the memory or its products through the cores. Caches may serve a small
model's weights faster than memory does; on such a machine a fraction above 1 is possible, and is no error.
"""

from dataclasses import dataclass

import torch

from benchmarks.engine.cases import Case, Rate
from benchmarks.figures import wall_s
from engine.model.config import DecoderConfig
from measure.simulate.roofline import ModelShape

_READ_BYTES = 1 << 30
_MATMUL_SIZES = (1024, 2048)
_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Speeds of this machine with all threads."""

    read_bytes_per_s: float
    """Summing a large float32 tensor."""
    bf16_flops: float
    """A square bfloat16 matrix product, the best of several sizes."""


class RateMeter:
    """Measures the machine; one instance keeps the large tensor."""

    def __init__(self) -> None:
        self._bytes = torch.ones(_READ_BYTES // 4)

    def measure(self) -> MachineRates:
        """Return what the machine does at this moment: some tenths of a second."""
        read_s = min(wall_s(self._bytes.sum) for _ in range(4))
        return MachineRates(
            read_bytes_per_s=_READ_BYTES / read_s, bf16_flops=max(_matmul_flops(size) for size in _MATMUL_SIZES)
        )


def _matmul_flops(size: int) -> float:
    matrix = torch.randn(size, size).bfloat16()
    product_s = min(wall_s(lambda: matrix @ matrix) for _ in range(4))
    return float(2 * size**3 / product_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Bytes and floating-point operations of a decoder in bfloat16."""

    layer_params: int
    """Elements of all projections of all layers."""
    head_params: int
    kv_bytes_per_token: int
    attention_flops: int
    """Operations for one new token and one attended token, all layers: a product with the key, one with the value."""

    @classmethod
    def of(cls, config: DecoderConfig) -> "ModelCost":
        """Count a model. Norms, biases and activations are left out: they are small, and a floor may be too low."""
        shape = ModelShape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
        )
        return cls(
            layer_params=shape.num_layer_weights,
            head_params=shape.num_head_weights,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            attention_flops=4 * config.num_layers * config.num_heads * config.head_dim,
        )

    def prefill_s(self, rates: MachineRates, *, num_requests: int, prompt_tokens: int) -> float:
        """Return the least time to read prompts: all their products, at once, and one row each through the head."""
        pairs = prompt_tokens * (prompt_tokens + 1) // 2
        flops = num_requests * (
            2 * self.layer_params * prompt_tokens + 2 * self.head_params + self.attention_flops * pairs
        )
        return max(flops / rates.bf16_flops, self._weight_bytes / rates.read_bytes_per_s)

    def decode_step_s(self, rates: MachineRates, *, num_seqs: int, context_len: float) -> float:
        """Return the least time of one step: every weight and every key and value once, or the products."""
        bytes_read = self._weight_bytes + num_seqs * context_len * self.kv_bytes_per_token
        flops = num_seqs * (2 * (self.layer_params + self.head_params) + self.attention_flops * context_len)
        return max(bytes_read / rates.read_bytes_per_s, flops / rates.bf16_flops)

    def best_tokens_per_s(self, case: Case, rates: MachineRates) -> float:
        """Return the rate of a case on an engine that wastes nothing."""
        context_len = case.prompt_tokens + case.output_tokens / 2
        step_s = self.decode_step_s(rates, num_seqs=case.num_requests, context_len=context_len)
        if case.rate is Rate.DECODE:
            return case.num_requests / step_s
        prefill_s = self.prefill_s(rates, num_requests=case.num_requests, prompt_tokens=case.prompt_tokens)
        if case.rate is Rate.PREFILL:
            return case.num_requests * case.prompt_tokens / prefill_s
        return case.num_requests * case.output_tokens / (prefill_s + (case.output_tokens - 1) * step_s)

    @property
    def _weight_bytes(self) -> int:
        return (self.layer_params + self.head_params) * _BYTES_PER_ELEMENT
