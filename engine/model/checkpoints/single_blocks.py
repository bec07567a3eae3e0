"""Checkpoints whose layers are a mixer or an MLP each (Nemotron-H), read under the names of layers that have both."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from engine.weights.config import DecoderConfig
from engine.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    from engine.model.checkpoints.checkpoint import Checkpoint


class SingleBlocks:
    """A `Checkpoint` over another one, which has the tensors under their stored names."""

    def __init__(self, stored: "Checkpoint", config: DecoderConfig) -> None:
        self._stored = stored
        self._blocks = _blocks(config)
        self._names = {self._own_name(name): name for name in (*stored.plain, *stored.quantized)}
        self.plain: Collection[str] = [self._own_name(name) for name in stored.plain]
        self.quantized: Collection[str] = [self._own_name(name) for name in stored.quantized]

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        return self._stored.tensor(self._names[name])

    def weight(self, module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `Checkpoint`."""
        return self._stored.weight(self._names[module], shape)

    def _own_name(self, stored: str) -> str:
        """Return the name of a stored tensor or module."""
        root, _, rest = stored.partition(".")
        part, _, rest = rest.partition(".")
        if root not in _ROOTS:
            return stored
        if part in _OUTSIDE:
            return f"model.{_OUTSIDE[part]}.{rest}"
        block_idx, _, rest = rest.partition(".")
        if part != "layers" or not block_idx.isdecimal() or int(block_idx) >= len(self._blocks):
            return stored
        block = self._blocks[int(block_idx)]
        kind, _, rest = rest.partition(".")
        return f"model.layers.{block.layer_idx}.{block.norm if kind == 'norm' else block.module}.{rest}"


_ROOTS = ("backbone", "model")
_OUTSIDE = {"embeddings": "embed_tokens", "norm_f": "norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A stored layer."""

    layer_idx: int
    """Layer of the decoder that it belongs to."""
    module: str
    """Name of its mixer or MLP there."""
    norm: str


def _blocks(config: DecoderConfig) -> list[_Block]:
    blocks = []
    for layer_idx in range(config.num_layers):
        recurrent = config.recurrent_of(layer_idx)
        mixer = "self_attn" if recurrent is None else recurrent.module
        blocks.append(_Block(layer_idx=layer_idx, module=mixer, norm="input_layernorm"))
        if layer_idx not in config.lone_layers:
            blocks.append(_Block(layer_idx=layer_idx, module=config.mlp.module, norm="post_attention_layernorm"))
    return blocks
