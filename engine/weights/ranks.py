"""How a decoder is cut among ranks.

A rank has some heads, a part of each MLP and expert between its projections, and a part of the vocabulary. Products
whose inputs are cut (after attention, and down) are added up in segments, in float32, from first to last, whose number
follows from the model alone (`engine.weights.segments`): every number of ranks adds up the same numbers in the same
order, one rank included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.weights.config import DecoderConfig
from engine.weights.layout import FusedProjection, layer_projections
from engine.weights.segments import check_ranks

CUT_BY_INPUTS = frozenset({"output", "down"})
"""Fields of projections whose inputs are cut among ranks; `qkv` and `gate_up` are cut by their outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of several ranks."""

    idx: int
    size: int
    """Number of ranks."""

    def first_kv_head(self, config: DecoderConfig) -> int:
        """Return the first of the whole decoder's key heads that this rank has; several ranks may have the same."""
        return self.first_head_of(config.num_kv_heads)

    def first_head_of(self, num_kv_heads: int) -> int:
        """Return the first of so many key heads that this rank has."""
        return num_kv_heads * self.idx // self.size

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """Return the rank's part of a decoder. Raises UnsupportedModel, naming the numbers that are possible."""
        check_ranks(config, self.size)
        experts = config.experts
        if experts is not None:
            shared = experts.shared and replace(experts.shared, size=experts.shared.size // self.size)
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size, shared=shared)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
            experts=experts,
        )

    def cuts(self, config: DecoderConfig) -> dict[str, "Cut"]:
        """Return what the rank takes of a checkpoint's tensors, by name; all others it takes whole."""
        mine, found = self.config(config), dict[str, Cut]()
        for layer_idx in range(config.num_layers):
            projections = zip(layer_projections(config, layer_idx), layer_projections(mine, layer_idx), strict=True)
            for whole, part in projections:
                found.update(self._cuts(config, whole, part))
            size = mine.num_heads
            sinks = Cut(dim=0, whole=config.num_heads, pieces=((self.idx * size, size),))
            found[f"model.layers.{layer_idx}.self_attn.sinks"] = sinks
        return found

    def _cuts(
        self, config: DecoderConfig, whole: FusedProjection, part: FusedProjection
    ) -> Iterator[tuple[str, "Cut"]]:
        if whole.field in CUT_BY_INPUTS:
            size = part.in_features
            cut = Cut(dim=1, whole=whole.in_features, pieces=((self.idx * size, size),))
            yield f"{whole.modules[0]}.weight", cut
        elif whole.field == "gate_up":
            for module, rows, mine in zip(whole.modules, whole.rows, part.rows, strict=True):
                halves = 2 if config.has_gates and len(whole.modules) == 1 else 1
                size, taken = rows // halves, mine // halves
                pieces = tuple((half * size + self.idx * taken, taken) for half in range(halves))
                yield from _rows(module, Cut(dim=0, whole=rows, pieces=pieces))
        elif whole.field == "qkv":
            for i, (module, rows, mine) in enumerate(zip(whole.modules, whole.rows, part.rows, strict=True)):
                first = self.idx * mine if i == 0 else self.first_kv_head(config) * config.head_dim
                yield from _rows(module, Cut(dim=0, whole=rows, pieces=((first, mine),)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Part of a tensor."""

    dim: int
    whole: int
    """Size of the whole tensor in this dimension."""
    pieces: tuple[tuple[int, int], ...]
    """Beginning and length of each piece."""

    def shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the whole tensor, given that of the part."""
        return torch.Size([*part[: self.dim], self.whole, *part[self.dim + 1 :]])

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole tensor."""
        return torch.cat([tensor.narrow(self.dim, begin, length) for begin, length in self.pieces], self.dim)


def _rows(module: str, cut: Cut) -> Iterator[tuple[str, Cut]]:
    yield f"{module}.weight", cut
    yield f"{module}.bias", cut
