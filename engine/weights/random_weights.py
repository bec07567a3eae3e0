"""Random weights, made on the device that uses them: no file, no copy through the host.

Every element is a function of (seed, tensor name, position): a counter goes through the mixing function of SplitMix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). torch's generators do not suffice: their
numbers depend on the device and even on its number of multiprocessors, so that two workers on different hardware would
have different KV under the same hash.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.random_models import CONFIGS, RandomModel
from engine.weights.config import DecoderConfig
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.layout import checkpoint_views, complete_norms
from engine.weights.ranks import Cut

# Elements at a time: on a CPU they fit into its cache; on a GPU launches are few, with 84 MiB of scratch space.
_CHUNK_CPU, _CHUNK_DEVICE = 1 << 16, 1 << 22
_DEFAULT_STD = 0.02


def fill_weights(
    weights: DecoderWeights, model: RandomModel, config: DecoderConfig, cuts: Mapping[str, Cut] | None = None
) -> None:
    """Overwrite weights with a random model's, the same float32 values on every machine, rounded to their dtype.

    `cuts`: what the weights have of tensors, by their names; all of others.
    """
    std = initializer_range(CONFIGS[model.name])
    for name, view in checkpoint_views(weights, config).items():
        cut = None if cuts is None else cuts.get(name)
        if cut is None:
            fill_random({name: view}, seed=model.seed, std=std)
            continue
        whole = torch.empty(cut.shape(view.shape), dtype=view.dtype, device=view.device)
        fill_random({name: whole}, seed=model.seed, std=std)
        view.copy_(cut.of(whole))
    complete_norms(weights, config)


def initializer_range(raw_config: Mapping[str, Any]) -> float:
    """Return the standard deviation of a model's initial matrices, by its config.json."""
    return float(raw_config.get("initializer_range") or _DEFAULT_STD)


@torch.no_grad()
def fill_random(tensors: Mapping[str, Tensor], *, seed: int, std: float) -> None:
    """Overwrite contiguous tensors, given by their names in a Hugging Face checkpoint.

    Norms become 1, biases 0, all others uniform on ±sqrt(3) * std (mean 0, standard deviation `std`). A transformers
    model filled by the same names computes the same function.
    """
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            _fill_uniform(tensor, _stream_key(seed, name), math.sqrt(3) * std)


def _fill_uniform(tensor: Tensor, key: int, bound: float) -> None:
    flat = tensor.view(-1)  # raises when it is not contiguous
    chunk = _CHUNK_CPU if flat.device.type == "cpu" else _CHUNK_DEVICE
    for begin in range(0, flat.numel(), chunk):
        end = min(begin + chunk, flat.numel())
        bits = _split_mix(torch.arange(begin, end, dtype=torch.int64, device=flat.device), key)
        # The upper 24 bits, with their sign, fit into a float32's mantissa: the value is rounded only once.
        values = (bits >> 40).float().add_(0.5).mul_(bound / (1 << 23))
        flat[begin:end].copy_(values)


def _split_mix(counter: Tensor, key: int) -> Tensor:
    """Return 64 random bits for each counter, int64. Mutates the counter. Integers wrap; shifts are logical."""
    counter.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(key))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        counter.bitwise_xor_((counter >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return counter.bitwise_xor_((counter >> 31).bitwise_and_((1 << 33) - 1))


def _stream_key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value
