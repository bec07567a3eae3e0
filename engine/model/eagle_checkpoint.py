"""Reads draft layers as they are published: EAGLE's and EAGLE-3's own files, and MTP layers in a model's checkpoint.

EAGLE, EAGLE-3 and conversions with the same names: a folder holds `config.json` and `model.safetensors` or
`pytorch_model.bin`. Tensors, below "layers.0." or, in EAGLE-3, "midlayer.":

    self_attn.{q,k,v,o}_proj.weight, mlp.{gate,up,down}_proj.weight, post_attention_layernorm.weight
    hidden_norm.weight, input_layernorm.weight                          EAGLE-3

and beside them "fc.weight" [hidden, 2 * hidden], in EAGLE-3 [hidden, 3 * hidden of the model], in EAGLE perhaps
"fc.bias"; perhaps "embed_tokens.weight", which is mostly a copy of the model's; in EAGLE-3 "norm.weight", perhaps
"lm_head.weight" [draft vocabulary, hidden], and where that vocabulary is a part of the model's, "d2t": what to add to
the index of each of its tokens. A `hidden_norm` identifies EAGLE-3. Names and shapes are those of the EAGLE authors'
`eagle/model/cnets.py` and `cnets1.py`, and of vLLM's `llama_eagle.py` and `llama_eagle3.py`.

MTP: the checkpoint of a MiMo model holds, below "model.mtp_layers.0.", the tensors of one of its layers,
"input_proj.weight" [hidden, 2 * hidden] and "{token,hidden,final}_layernorm.weight", as in `mimo_mtp.py`, which the
model's authors wrote for vLLM. Embedding and output head are the model's.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from engine.model.checkpoints.checkpoint import open_checkpoint, read_config
from engine.model.checkpoints.quantization_config import read_weight_format
from engine.model.checkpoints.safetensors_files import open_safetensors
from engine.model.eagle import EagleLayer, EagleWeights, Logits
from engine.model.loader import MTP_PREFIX, weight_files
from engine.weights.config import DecoderConfig, UnsupportedModel, parse_config, read_json
from engine.weights.decoder_weights import Linear

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
NUM_TAPPED_LAYERS = 3
_LAYER = "layers.0."
_DERIVED = ("t2d", "rotary_emb.inv_freq")
"""Ends of the names of tensors that repeat what others say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedModel:
    """The model that a layer drafts for."""

    num_layers: int
    embedding: Tensor
    """[vocab, hidden]."""
    logits: Logits


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers before which EAGLE-3 takes the residual stream, where its config.json does not name them."""
    return 2, num_layers // 2, num_layers - 3


def read_eagle(folder: Path, model: DraftedModel) -> EagleLayer:
    """Read a draft layer, in the dtype of the model. Raises UnsupportedModel, naming what does not fit the model."""
    raw = read_json(folder / "config.json")
    tensors = _Tensors(_load(folder, model.embedding.dtype))
    has_states_of_layers = tensors.has(f"{_LAYER}hidden_norm.weight")
    config = _config(raw, tensors)
    hidden_size, (vocab_size, model_hidden) = config.hidden_size, model.embedding.shape
    if config.vocab_size != vocab_size:
        raise UnsupportedModel(
            f"cannot draft with {folder}: it is for {config.vocab_size} tokens, and this model has {vocab_size}"
        )
    weights = EagleWeights(
        embedding=tensors.take_embedding(model.embedding, hidden_size),
        fc=tensors.linear(
            ["fc"],
            hidden_size,
            NUM_TAPPED_LAYERS * model_hidden if has_states_of_layers else hidden_size + model_hidden,
        ),
        **tensors.take_block(config, in_features=(1 + has_states_of_layers) * hidden_size),
    )
    layers: tuple[int, ...] = ()
    if has_states_of_layers:
        weights.hidden_norm = tensors.take_norm(f"{_LAYER}hidden_norm.weight", hidden_size)
        weights.input_norm = tensors.take_norm(f"{_LAYER}input_layernorm.weight", hidden_size)
        weights.final_norm = tensors.take_norm("norm.weight", hidden_size)
        named = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        layers = _checked_layers(named or tapped_layers(model.num_layers), model.num_layers)
    if tensors.has("lm_head.weight"):
        num_drafted = raw.get("draft_vocab_size") or vocab_size
        weights.head = tensors.linear(["lm_head"], num_drafted, hidden_size)
        weights.token_ids = tensors.take_token_ids(num_drafted, vocab_size)
    elif hidden_size != model_hidden:
        raise UnsupportedModel(f"cannot draft with {folder}: it has no lm_head.weight, and other sizes than the model")
    tensors.refuse_rest(folder)
    return EagleLayer(
        config,
        weights,
        vocab_size=vocab_size,
        model_logits=model.logits,
        tapped_layers=layers,
        has_normed_residual=bool(raw.get("norm_before_residual", False)),
    )


def read_mtp(model_dir: Path, model: DraftedModel) -> EagleLayer:
    """Read the MTP layer in a model's own checkpoint, in the dtype of the model.

    Raises UnsupportedModel when there is none, or another one than the model's architecture has.
    """
    files = weight_files(model_dir)
    raw = read_config(model_dir, files)
    whole = parse_config(raw)
    num_layers = raw.get("num_nextn_predict_layers") or 0
    if num_layers != 1:
        raise UnsupportedModel(
            f"cannot draft with an MTP layer of {model_dir}: config.json says num_nextn_predict_layers: {num_layers},"
            " and only 1 is supported"
        )
    config = replace(whole, num_layers=1, windows=whole.windows[:1])
    prefix, dtype, size = f"{MTP_PREFIX}0.", model.embedding.dtype, config.hidden_size
    with open_checkpoint(files, whole, read_weight_format(raw)) as checkpoint:
        names = [name for name in checkpoint.plain if name.startswith(MTP_PREFIX)]
        quantized = sorted(module for module in checkpoint.quantized if module.startswith(MTP_PREFIX))
        if quantized:
            raise UnsupportedModel(f"cannot draft with an MTP layer of {model_dir}: {quantized[0]} is quantized")
        tensors = _Tensors({name.replace(prefix, _LAYER): checkpoint.tensor(name).to(dtype) for name in names})
    weights = EagleWeights(
        embedding=model.embedding,
        fc=tensors.linear([f"{_LAYER}input_proj"], size, 2 * size),
        **tensors.take_block(config, in_features=size),
        input_norm=tensors.take_norm(f"{_LAYER}token_layernorm.weight", size),
        state_norm=tensors.take_norm(f"{_LAYER}hidden_layernorm.weight", size),
        hidden_norm=tensors.take_norm(f"{_LAYER}input_layernorm.weight", size),
        final_norm=tensors.take_norm(f"{_LAYER}final_layernorm.weight", size),
    )
    tensors.refuse_rest(model_dir)
    return EagleLayer(
        config,
        weights,
        vocab_size=config.vocab_size,
        model_logits=model.logits,
        tapped_layers=(model.num_layers,),
    )


def mtp_bytes(model_dir: Path) -> int:
    """Return how many bytes the plain MTP layers in a checkpoint take; 0: it has none. Raises UnsupportedModel."""
    files = [file for file in weight_files(model_dir) if file.suffix == ".safetensors"]
    with open_safetensors(files, read_weight_format(read_json(model_dir / "config.json"))) as checkpoint:
        return sum(checkpoint.tensor(name).nbytes for name in checkpoint.plain if name.startswith(MTP_PREFIX))


def _load(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a folder, floats in `dtype`, by names without "model."; a layer's are "layers.0."."""
    try:
        if (folder / SAFETENSORS).is_file():
            found = safetensors.torch.load_file(folder / SAFETENSORS)
        elif (folder / PICKLED).is_file():  # only tensors are unpickled
            found = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
        else:
            raise UnsupportedModel(f"{folder} has neither {SAFETENSORS} nor {PICKLED}")
    except (safetensors.SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UnsupportedModel(f"cannot read the draft layer in {folder}: {error}") from error
    if not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UnsupportedModel(f"cannot read the draft layer in {folder}: it holds more than tensors")
    names = {name: name.removeprefix("model.") for name in found}
    return {
        _LAYER + short.removeprefix("midlayer.") if short.startswith("midlayer.") else short: (
            found[name].to(dtype) if found[name].is_floating_point() else found[name]
        )
        for name, short in names.items()
    }


def _config(raw: Mapping[str, Any], tensors: "_Tensors") -> DecoderConfig:
    """Return the configuration of the layer. Published ones name architectures of all sorts, or none."""
    num_layers = raw.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise UnsupportedModel(f"num_hidden_layers: {num_layers} of a draft layer is not supported, only 1")
    fixed = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    config = parse_config({**raw, **fixed})
    return replace(config, has_qkv_bias=tensors.has(f"{_LAYER}self_attn.q_proj.bias"))


def _checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    if len(layers) != NUM_TAPPED_LAYERS or not all(0 <= layer < num_layers for layer in layers):
        raise UnsupportedModel(
            f"cannot draft from the states before layers {list(layers)}: EAGLE-3 needs {NUM_TAPPED_LAYERS} of the"
            f" {num_layers} layers of the model"
        )
    return tuple(layers)


class _Tensors:
    """The tensors of a checkpoint, and which of them have no place yet."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._left = {name for name in tensors if not name.endswith(_DERIVED)}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor."""
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of a shape. Raises UnsupportedModel."""
        tensor = self._tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise UnsupportedModel(f"cannot draft with this layer: {name} {found}; the model needs {list(shape)}")
        self._left.discard(name)
        return tensor

    def take_norm(self, name: str, size: int) -> Tensor:
        """Return a norm in float32, as kernels read it. Raises UnsupportedModel."""
        return self.take(name, size).float()

    def linear(self, modules: Sequence[str], num_rows: int, in_features: int) -> Linear:
        """Return the joined rows of some modules. Raises UnsupportedModel."""
        parts = [self._rows(f"{module}.weight", in_features) for module in modules]
        if sum(map(len, parts)) != num_rows:
            found = " and ".join(f"{module} {list(part.shape)}" for module, part in zip(modules, parts, strict=True))
            raise UnsupportedModel(f"cannot draft with this layer: {found}; config.json says {num_rows} rows together")
        biases = [f"{module}.bias" for module in modules]
        bias = None
        if self.has(biases[0]):
            bias = torch.cat([self.take(name, len(part)) for name, part in zip(biases, parts, strict=True)])
        return Linear(weight=torch.cat(parts), bias=bias)

    def take_block(self, config: DecoderConfig, *, in_features: int) -> dict[str, Any]:
        """Return the fields of `EagleWeights` that a plain decoder layer has, with inputs of attention of a size.

        Raises UnsupportedModel.
        """
        hidden_size, attended_size = config.hidden_size, config.num_heads * config.head_dim
        qkv_size = attended_size + 2 * config.num_kv_heads * config.head_dim
        gate_up = [f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up")]
        return {
            "qkv": self.linear([f"{_LAYER}self_attn.{name}_proj" for name in "qkv"], qkv_size, in_features),
            "output": self.linear([f"{_LAYER}self_attn.o_proj"], hidden_size, attended_size),
            "post_attention_norm": self.take_norm(f"{_LAYER}post_attention_layernorm.weight", hidden_size),
            "gate_up": self.linear(gate_up, 2 * config.intermediate_size, hidden_size),
            "down": self.linear([f"{_LAYER}mlp.down_proj"], hidden_size, config.intermediate_size),
        }

    def take_embedding(self, model: Tensor, hidden_size: int) -> Tensor:
        """Return the embedding: the model's, unless the checkpoint has another one."""
        name = "embed_tokens.weight"
        if not self.has(name):
            if hidden_size != model.shape[1]:
                raise UnsupportedModel(f"cannot draft with this layer: {name} is missing; the model's has another size")
            return model
        own = self.take(name, len(model), hidden_size)
        return model if own.shape == model.shape and torch.equal(own, model) else own

    def take_token_ids(self, num_drafted: int, vocab_size: int) -> Tensor | None:
        """Return the ids of the tokens that the output head drafts; None: all, in order."""
        if num_drafted == vocab_size and not self.has("d2t"):
            return None
        token_ids = self.take("d2t", num_drafted).long() + torch.arange(num_drafted)
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise UnsupportedModel(
                f"cannot draft with this layer: d2t names tokens outside of the model's {vocab_size}"
            )
        return token_ids

    def refuse_rest(self, folder: Path) -> None:
        """Raise UnsupportedModel when tensors are left, which would change what the layer says."""
        if self._left:
            raise UnsupportedModel(
                f"cannot draft with {folder}: {min(self._left)} has no place in a layer of EAGLE or EAGLE-3, nor in the"
                " MTP layer of MiMo; other kinds are not supported"
            )

    def _rows(self, name: str, in_features: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None or tensor.ndim != 2 or tensor.shape[1] != in_features:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise UnsupportedModel(
                f"cannot draft with this layer: {name} {found}; the model needs {in_features} columns"
            )
        self._left.discard(name)
        return tensor
