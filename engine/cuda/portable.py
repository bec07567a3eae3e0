"""Makes `DeviceOps` of any `Ops`: the reference for tests, and the fallback when Triton is not installed."""

from torch import Tensor
from torch.nn import functional as F

from engine.ops.interface import LatentStepOps, Ops, StepOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.triton_kernels.step import DeviceStep
from engine.weights.decoder_weights import LatentWeights


class PortableOps:
    """Reads steps back to the host and plans them there; a `DeviceOps`. Waits for the device in every step."""

    tile_tokens = 64

    def __init__(self, ops: Ops, *, block_size: int) -> None:
        self.name = ops.name
        self._ops = ops
        self._block_size = block_size

    def bind(self, step: DeviceStep) -> StepOps:
        """Return the operations of the step as it is now: their launches cannot be replayed.

        Raises RuntimeError for a step of padding alone.
        """
        starts, context_lens = step.query_start_loc.tolist(), step.context_lens.tolist()
        tables = step.block_tables.cpu().numpy()
        # Padding comes last: sequences without a context, or tokens after those of all sequences.
        spans = [
            SequenceSpan(
                num_computed=context_len - (end - begin),
                num_new_tokens=end - begin,
                block_table=table[: -(-context_len // self._block_size)].tolist(),
            )
            for begin, end, context_len, table in zip(starts[:-1], starts[1:], context_lens, tables, strict=True)
            if context_len
        ]
        if not spans:  # only in a trial
            raise RuntimeError(f"{self.name} plans steps on the host")
        planned = self._ops.plan(AttentionMetadata.from_spans(spans, block_size=self._block_size))
        return _PaddedStep(planned, sum(span.num_new_tokens for span in spans))


class _PaddedStep:
    """A step whose last rows are padding; a `StepOps` and a `LatentStepOps`."""

    def __init__(self, ops: StepOps, num_tokens: int) -> None:
        self._ops = ops
        self._num_tokens = num_tokens

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        return self._ops.rms_norm(x, weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """See `StepOps`."""
        return self._ops.add_rms_norm(x, residual, weight)

    def attend(
        self,
        layer_idx: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `StepOps`; padding reads zeros and writes nothing."""
        attended = self._ops.attend(layer_idx, qkv[: self._num_tokens], q_norm, k_norm, sinks)
        return F.pad(attended, (0, 0, 0, len(qkv) - self._num_tokens))

    def attend_latent(self, layer_idx: int, compressed: Tensor, weights: LatentWeights) -> Tensor:
        """See `LatentStepOps`; padding reads zeros and writes nothing."""
        assert isinstance(self._ops, LatentStepOps), f"{self._ops} are for layers with keys and values"
        attended = self._ops.attend_latent(layer_idx, compressed[: self._num_tokens], weights)
        return F.pad(attended, (0, 0, 0, len(compressed) - self._num_tokens))

    def gate_mul(self, gate_up: Tensor) -> Tensor:
        """See `StepOps`."""
        return self._ops.gate_mul(gate_up)
