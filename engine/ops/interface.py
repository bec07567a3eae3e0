"""The seam between the decoder and the kernels.

A decoder is matrix products (`engine.weights.decoder_weights.Linear`) and, between them, the operations below. They are
bound by memory: a good implementation reads and writes every byte once.

    torch_ops.TorchOps             portable reference, any device
    cpu.CpuOps                     C++ kernels for the CPU, where a compiler is at hand
    triton_kernels.TritonOps       CUDA
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.ops.metadata import AttentionMetadata
from engine.weights.decoder_weights import LatentWeights, RecurrentWeights
from engine.weights.quantize import Fp8Rows


class StepOps(Protocol):
    """Operations of one planned step. Tensors have the weights' dtype, norms float32; rows are new tokens."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x / rms(x) * weight, [num_tokens, hidden_size]; the mean square is taken in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """Add x to the residual stream (mutates `residual`) and return its norm, as `rms_norm` does."""
        ...

    def attend(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of the new tokens over their contexts, [num_tokens, num_heads * head_dim].

        qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] has the projected query, key and value heads; with
        `has_gated_attention`, a gate behind each query head, whose sigmoid multiplies what the head has attended. Query
        and key heads are normalised (q_norm, k_norm [head_dim], or None) and rotated to their positions, and the new
        keys and values are written to the layer's pages before the read. Each of the sinks [num_heads] is a logit that
        joins its head's softmax and has no value. Mutates the pages, and may mutate qkv.
        """
        ...

    def gate_mul(self, gate_up: Tensor) -> Tensor:
        """Return f(gate) * up, [num_tokens, intermediate_size], of gate_up [num_tokens, 2 * intermediate_size].

        f is the model's activation. Without gates it is f(up), of up [num_tokens, intermediate_size].
        """
        ...


@runtime_checkable
class LatentStepOps(Protocol):
    """Operations of models with latent attention."""

    def attend_latent(self, layer_idx: int, compressed: Tensor, weights: LatentWeights) -> Tensor:
        """Return the attention of the new tokens over their contexts, [num_tokens, num_heads * value_dim].

        compressed [num_tokens, features] are products of `LayerWeights.qkv`: the queries, or what `weights` makes them
        from, and the pages' rows. Both are normalised and rotated, and the rows are written to the layer's pages before
        the read. Mutates the pages.
        """
        ...


@runtime_checkable
class RecurrentStepOps(Protocol):
    """Operations of models with recurrent layers."""

    def recur(self, layer_idx: int, projected: Tensor, weights: RecurrentWeights) -> Tensor:
        """Return what the layer's recurrence makes of the new tokens, [num_tokens, output_size].

        projected [num_tokens, features] are products of `LayerWeights.qkv`. Each sequence goes on from its state in the
        page before the step, and leaves its state in the page behind it (`StatePages`). Mutates the pages.
        """
        ...


@runtime_checkable
class Fp8StepOps(Protocol):
    """Operations that also round their results to 8 bits, as `Fp8Linear` would; each saves one kernel launch."""

    def rms_norm_fp8(self, x: Tensor, weight: Tensor) -> Fp8Rows:
        """Return `StepOps.rms_norm` in 8 bits."""
        ...

    def add_rms_norm_fp8(self, x: Tensor, residual: Tensor, weight: Tensor) -> Fp8Rows:
        """Return `StepOps.add_rms_norm` in 8 bits."""
        ...

    def gate_mul_fp8(self, gate_up: Tensor) -> Fp8Rows:
        """Return `StepOps.gate_mul` in 8 bits."""
        ...


class Ops(Protocol):
    """Kernels for one model on one device, bound to its pages. Engine thread only."""

    name: str
    """Name for the log."""

    def plan(self, metadata: AttentionMetadata) -> StepOps:
        """Prepare a step; valid until the next one is planned."""
        ...
