"""A rank's part of a decoder's products, in torch: `engine.model.decoder.Decoder` calls them as it does whole ones.

Products with qkv and gate_up have the rows of the rank's heads and inner values, for itself alone. Those with output
and down have the columns of these: every rank's sums, in float32, are added up (`RowParallel`), and of experts once for
all of them. The head has the rows of some tokens, whose logits are joined (`GatheredHead`).
"""

import torch
from torch import Tensor

from engine.ops.cpu.linear import OneDnnLinear, can_pack
from engine.ranks.group import RankGroup
from engine.weights.decoder_weights import DecoderWeights, GatedMlp, Linear, Moe, Projection, plain
from engine.weights.expert_stacks import StackedMoe


def cut_products(weights: DecoderWeights, group: RankGroup) -> None:
    """Put in place the products that ranks add up or join. Mutates a rank's weights, of which the head is whole."""
    for layer in weights.layers:
        layer.output = RowParallel(plain(layer.output), group)
        match layer.mlp:
            case Moe():
                # Stacked experts give rounded results, as with one rank: their sums alone are wide.
                first = layer.mlp.config.num_experts if isinstance(layer.mlp, StackedMoe) else 0
                for expert in layer.mlp.experts[first:]:
                    expert.down = PartialSums(plain(expert.down))
                layer.mlp.add_up = group.add_up
            case GatedMlp():
                layer.mlp.down = RowParallel(plain(layer.mlp.down), group)
    weights.head = GatheredHead(plain(weights.head), group)


class PartialSums:
    """What a rank has of a product whose inputs are cut: float32, without its bias. A `Projection`.

    On a CPU torch has no products of bfloat16 with unrounded sums, so that the weight is widened.
    """

    def __init__(self, linear: Linear) -> None:
        self._weight = linear.weight if linear.weight.is_cuda else linear.weight.float()
        self._product = _packed(Linear(weight=self._weight, bias=None))
        self.num_bytes = self._weight.nbytes
        """See `Projection`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [num_tokens, out_features] for x [num_tokens, in_features]."""
        if self._weight.dtype is torch.float32:
            return self._product(x.float())
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)


class RowParallel:
    """A product whose inputs are cut among ranks, rounded once, when all sums are added up. A `Projection`."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        self._sums = PartialSums(linear)
        self._bias = linear.bias
        self._group = group
        self.num_bytes = self._sums.num_bytes
        """See `Projection`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, out_features] for x [num_tokens, in_features], the rank's inputs."""
        sums = self._group.add_up(self._sums(x))
        return (sums if self._bias is None else sums + self._bias).to(x.dtype)


class GatheredHead:
    """A head of which each rank has the rows of some tokens, as many as all others. A `Projection`."""

    def __init__(self, head: Linear, group: RankGroup) -> None:
        """Take the whole head, and keep a part of it."""
        self._group, self._vocab_size = group, len(head.weight)
        size = -(-self._vocab_size // group.rank.size)
        begin = min(group.rank.idx * size, self._vocab_size)
        mine = head.weight[begin : begin + size]
        part = mine.new_zeros((size, mine.shape[1]))
        part[: len(mine)] = mine
        self._product = _packed(Linear(weight=part, bias=None))
        self.num_bytes = self._product.num_bytes
        """See `Projection`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] for x [num_rows, hidden_size]."""
        parts = self._group.gather(self._product(x))
        return torch.cat(parts.unbind(), dim=1)[:, : self._vocab_size].contiguous()


def _packed(linear: Linear) -> Projection:
    return OneDnnLinear(linear) if can_pack(linear.weight) else linear
