"""The work of a step, and the least time that a device takes for it.

No engine is faster than its bytes through the memory or its products through the cores (Williams et al., "Roofline",
CACM 2009). Caches may serve a small model's weights faster than memory does: then a step is faster than its floor.
"""

from dataclasses import dataclass, replace

from common.timing import StepModel, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query, or latent, attention and a gated MLP; some layers may have a recurrence instead."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head; of latent attention, the mean of its query's and its value's."""
    intermediate_size: int
    vocab_size: int
    bytes_per_value: int = 2
    """Bytes of a weight, a KV element and an activation; 2: bf16."""
    latent_row_size: int | None = None
    """Values of a token's row in each layer's pages; None: it has keys and values of `num_kv_heads`."""
    attention_weights: int | None = None
    """Weights of one layer's attention; None: those of heads of query, key, value and of their results."""
    num_recurrent_layers: int = 0
    """Layers without attention."""
    recurrent_weights: int = 0
    """Weights of one such layer, without its MLP."""

    @property
    def num_layer_weights(self) -> int:
        """Weights of all layers, which every token is multiplied with, without embedding and output head."""
        attention = self.attention_weights
        if attention is None:
            attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        recurrent = self.num_recurrent_layers * self.recurrent_weights
        mlps = self.num_layers * 3 * self.hidden_size * self.intermediate_size
        return self.num_attention_layers * attention + recurrent + mlps

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers - self.num_recurrent_layers

    @property
    def num_head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of layers and head, which every step reads once."""
        return (self.num_layer_weights + self.num_head_weights) * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values, or latent rows, of one token, all layers."""
        num_values = self.latent_row_size or 2 * self.num_kv_heads * self.head_dim
        return self.num_attention_layers * num_values * self.bytes_per_value

    @property
    def flops_per_pair(self) -> int:
        """Arithmetic of a token and one it attends to: products of query and key, and of weight and value."""
        return 4 * self.num_attention_layers * self.num_heads * self.head_dim

    def product_flops(self, shape: StepShape) -> int:
        """Return the arithmetic of a step's products with weights; one prompt token of the step goes through the head.

        Norms and activations are left out.
        """
        num_tokens = shape.num_prefill_tokens + shape.num_decodes
        num_logits = shape.num_decodes + (1 if shape.num_prefill_tokens else 0)
        return 2 * (self.num_layer_weights * num_tokens + self.num_head_weights * num_logits)

    def num_flops(self, shape: StepShape) -> int:
        """Return the arithmetic of a step: products and attention."""
        num_pairs = shape.num_prefill_pairs + shape.num_context_tokens
        return self.product_flops(shape) + self.flops_per_pair * num_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Measured speeds of a device as one process uses it."""

    read_bytes_per_s: float
    """Bytes read from memory."""
    flops_per_s: float
    """Floating-point operations of large bfloat16 matrix products."""
    num_cores: int = 0
    """Cores that this took; 0: an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloors:
    """Least times of a model's steps on a device."""

    model: ModelShape
    weight_bytes: int
    """Bytes of the weights as they are stored, which every step reads once."""
    kv_bytes_per_token: int
    """Bytes of one token's keys and values as they are stored."""
    rates: DeviceRates

    @property
    def weights_s(self) -> float:
        """Time to read every weight once."""
        return self.weight_bytes / self.rates.read_bytes_per_s

    def memory_s(self, shape: StepShape) -> float:
        """Return the time to read every weight once, and the keys and values of decoding sequences."""
        kv_bytes = shape.num_context_tokens * self.kv_bytes_per_token
        return self.weights_s + kv_bytes / self.rates.read_bytes_per_s

    def compute_s(self, shape: StepShape) -> float:
        """Return the time of the step's arithmetic."""
        return self.model.num_flops(shape) / self.rates.flops_per_s

    def step_s(self, shape: StepShape) -> float:
        """Return the longer of both: no step is faster."""
        return max(self.memory_s(shape), self.compute_s(shape))

    @property
    def decode_estimate(self) -> StepModel:
        """Estimate of steps that only decode: memory traffic and arithmetic, one after the other."""
        model, rates = self.model, self.rates
        kv_s, pair_s = self.kv_bytes_per_token / rates.read_bytes_per_s, model.flops_per_pair / rates.flops_per_s
        return StepModel(
            constant_s=self.weights_s,
            per_decode_s=2 * (model.num_layer_weights + model.num_head_weights) / rates.flops_per_s,
            per_context_token_s=kv_s + pair_s,
        )

    @property
    def prefill_estimate(self) -> StepModel:
        """The same of steps with prompt tokens."""
        return replace(
            self.decode_estimate,
            per_prefill_token_s=2 * self.model.num_layer_weights / self.rates.flops_per_s,
            per_prefill_pair_s=self.model.flops_per_pair / self.rates.flops_per_s,
        )
