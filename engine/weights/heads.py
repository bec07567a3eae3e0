"""Draft heads on the last hidden state, as Medusa trains them (Cai et al., 2401.10774).

Head k predicts the token k + 1 places behind the one that the model itself predicts:

    state_k = x + SiLU(W_k x + b_k), once for each layer of the head;   logits_k = output head of the model, or its own

Files are those of Medusa's own checkpoints in safetensors: "{head}.{layer}.linear.weight" and ".bias", and
"{head}.{number of layers}.weight" for an output head of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from engine.weights.config import UnsupportedModel

FILE_NAME = "medusa_lm_head.safetensors"

ComputeLogits = Callable[[Tensor], Tensor]
"""Logits [rows, vocab] of the model's output head for hidden states [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class _Layer:
    weight: Tensor
    """[heads, hidden (in), hidden (out)]."""
    bias: Tensor
    """[heads, 1, hidden]."""


class DraftHeads:
    """Loaded heads. They compute in float32, whose few numbers take little time; an output head has its own dtype."""

    def __init__(self, layers: list[_Layer], outputs: list[Tensor] | None) -> None:
        self._layers = layers
        self._outputs = outputs
        """Own output head of each, [vocab, hidden]; None: the model's."""
        self.num_heads = len(layers[0].weight)

    @classmethod
    def read(cls, folder: Path, *, hidden_size: int, vocab_size: int) -> "DraftHeads":
        """Read a checkpoint. Raises UnsupportedModel, naming what does not fit the model."""
        path = folder / FILE_NAME
        if not path.exists():
            raise UnsupportedModel(f"{folder} has no {FILE_NAME}")
        tensors = safetensors.torch.load_file(path)
        heads = [name.partition(".")[0] for name in tensors]
        num_heads = 1 + max((int(head) for head in heads if head.isdecimal()), default=-1)
        num_layers = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in tensors)
        if not num_heads or not num_layers:
            raise UnsupportedModel(f"{path} holds no heads")
        layers = [_read_layer(tensors, num_heads, layer, hidden_size) for layer in range(num_layers)]
        names = [f"{head}.{num_layers}.weight" for head in range(num_heads)]
        if not any(name in tensors for name in names):
            return cls(layers, None)
        return cls(layers, [_take(tensors, name, (vocab_size, hidden_size)) for name in names])

    @torch.inference_mode()
    def propose(
        self, hidden: npt.NDArray[np.float32], num_tokens: int, num_others: int, logits: ComputeLogits
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return for hidden states [rows, hidden] the likeliest tokens of the first `num_tokens` heads.

        And the `num_others` tokens that the first head finds likeliest after its first one.
        """
        states = torch.from_numpy(hidden).expand(num_tokens, -1, -1)
        for layer in self._layers:
            moved = torch.baddbmm(layer.bias[:num_tokens], states, layer.weight[:num_tokens])
            states = states + torch.nn.functional.silu(moved)
        if self._outputs is None:
            scores = logits(states.flatten(0, 1)).reshape(*states.shape[:2], -1)
        else:
            pairs = zip(states, self._outputs, strict=False)
            scores = torch.stack([state.to(output.dtype) @ output.T for state, output in pairs])
        ranked = scores[0].topk(1 + num_others).indices
        chosen = torch.cat((ranked[None, :, 0], scores[1:].argmax(dim=-1)))
        return chosen.T.tolist(), ranked[:, 1:].tolist()


def _read_layer(tensors: Mapping[str, Tensor], num_heads: int, layer: int, hidden_size: int) -> _Layer:
    names = [f"{head}.{layer}.linear" for head in range(num_heads)]
    weights = [_take(tensors, f"{name}.weight", (hidden_size, hidden_size)).float() for name in names]
    biases = [_take(tensors, f"{name}.bias", (hidden_size,)).float() for name in names]
    return _Layer(torch.stack([weight.T for weight in weights]).contiguous(), torch.stack(biases).unsqueeze(1))


def _take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
        raise UnsupportedModel(f"cannot draft with these heads: {name} {found}; the model needs {list(shape)}")
    return tensor
