"""Rounds a model's projections one after the other, each for what a text makes of those before it.

The text goes through the model twice, layer by layer: with its own weights, which gives the results wanted, and with
the weights rounded so far, which gives the inputs that a projection will have. Each pass multiplies a token with each
projection once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.ids import BlockId
from engine.ops.interface import StepOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import DecoderWeights, Linear, plain
from engine.weights.gptq import TextSums, round_for_text
from engine.weights.grouped import GroupedWeight, input_span, round_inputs
from engine.weights.layout import FusedProjection, layer_projections
from engine.weights.precision import dtype_name

_BLOCK_SIZE = 16


def round_for_windows(
    weights: DecoderWeights, config: DecoderConfig, windows: Sequence[Sequence[int]], *, bits: int, group_size: int
) -> Iterator[tuple[FusedProjection, GroupedWeight]]:
    """Yield each layer's projections, rounded for token windows of equal lengths, in their order.

    A group_size of -1 is all inputs. Inputs are in 8 bits, as the kernels for grouped weights take them. `weights` are
    plain, on a CPU, and stay as they are.
    """
    step = _plan(config, len(windows[0]), weights.embedding.dtype)

    def round_all(x: Tensor) -> Tensor:
        return round_inputs(x, input_span(x.shape[1] if group_size == -1 else group_size, x.shape[1]))

    scale = config.residual_scale
    exact, rounded = (_Pass(weights, windows, step, prepare, scale) for prepare in (_as_they_are, round_all))
    for layer_idx, layer in enumerate(weights.layers):
        for place, projection in zip(layer.places(), layer_projections(config, layer_idx), strict=True):
            linear = plain(place.get())
            wanted = exact.multiply(linear)
            sums = TextSums.zero((linear.weight.shape[0], linear.weight.shape[1]))
            for x, y in zip(rounded.inputs, rounded.missing(projection.field, wanted, exact), strict=True):
                sums.add(x, y if linear.bias is None else y - linear.bias)
            size = projection.in_features if group_size == -1 else group_size
            weight = round_for_text(linear.weight, sums, bits=bits, group_size=size)
            yield projection, weight
            found = rounded.multiply(Linear(weight=weight.dequantize(linear.weight.dtype), bias=linear.bias))
            exact.advance(layer_idx, projection.field, wanted)
            rounded.advance(layer_idx, projection.field, found)


class _Pass:
    """The hidden states of all windows at one place in the model: before a projection."""

    def __init__(
        self,
        weights: DecoderWeights,
        windows: Sequence[Sequence[int]],
        step: StepOps,
        prepare: Callable[[Tensor], Tensor],
        residual_scale: float,
    ) -> None:
        """Start before the first layer. `prepare` makes of a projection's inputs what it multiplies with."""
        self._weights = weights
        self._step = step
        self._prepare = prepare
        self._scale = residual_scale
        self._residuals = [weights.embed(torch.tensor(window)) for window in windows]
        self.inputs = self._prepared(step.rms_norm(each, weights.layers[0].input_norm) for each in self._residuals)
        """Inputs of the projection, [num_tokens, in_features] of each window."""

    def multiply(self, linear: Linear) -> list[Tensor]:
        """Return the projection's results."""
        return [linear(x) for x in self.inputs]

    def missing(self, field: str, wanted: list[Tensor], exact: "_Pass") -> list[Tensor]:
        """Return results that lead this pass to the residual stream that `exact` reaches with its results `wanted`.

        Results that are normalised first, of whatever length, are wanted as they are.
        """
        if field not in _NORM_AFTER or self._weights.layers[0].attention_output_norm is not None:
            return wanted
        residuals = zip(exact._residuals, self._residuals, strict=True)  # noqa: SLF001 - of the same class
        return [y + (there - here) / self._scale for y, (there, here) in zip(wanted, residuals, strict=True)]

    def advance(self, layer_idx: int, field: str, results: list[Tensor]) -> None:
        """Go on behind a projection, given its results, to the inputs of the next one. May mutate the results."""
        layer = self._weights.layers[layer_idx]
        match field:
            case "qkv":
                outputs = (self._step.attend(layer_idx, y, layer.q_norm, layer.k_norm, layer.sinks) for y in results)
            case "gate_up":
                outputs = (self._step.gate_mul(y) for y in results)
            case _:
                own = layer.attention_output_norm if field == "output" else layer.mlp_output_norm
                normed = results if own is None else [self._step.rms_norm(y, own) for y in results]
                added = normed if self._scale == 1 else [y * self._scale for y in normed]
                norm = layer.post_attention_norm if field == "output" else self._norm_behind(layer_idx)
                both = zip(added, self._residuals, strict=True)
                outputs = (self._step.add_rms_norm(y, residual, norm) for y, residual in both)
        self.inputs = self._prepared(outputs)

    def _norm_behind(self, layer_idx: int) -> Tensor:
        following = self._weights.layers[layer_idx + 1 : layer_idx + 2]
        return following[0].input_norm if following else self._weights.final_norm

    def _prepared(self, inputs: Iterator[Tensor]) -> list[Tensor]:
        return [self._prepare(x) for x in inputs]


_NORM_AFTER = ("output", "down")
"""Projections whose results are added to the residual stream."""


def _as_they_are(x: Tensor) -> Tensor:
    return x


def _plan(config: DecoderConfig, num_tokens: int, dtype: torch.dtype) -> StepOps:
    """Return the operations of a step that reads one prompt."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    shape = kv_shape(config, block_size=_BLOCK_SIZE, dtype=dtype, kv_dtype="auto", fingerprint=dtype_name(dtype))
    ops = TorchOps(config, TorchKvStore(shape, num_blocks, device=torch.device("cpu")))
    table = [BlockId(i) for i in range(num_blocks)]
    span = SequenceSpan(num_computed=0, num_new_tokens=num_tokens, block_table=table)
    return ops.plan(AttentionMetadata.from_spans([span], block_size=_BLOCK_SIZE))
