"""Rows of queries and keys that rotary embedding turns, in the order of our decoder.

Some checkpoints have the two rows of a pair side by side, ours half a head apart. All rows of queries and keys change
places alike, so that their products stay what they are; unweighted norms of heads do, too.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from engine.weights.config import UnsupportedModel
from engine.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    from engine.model.checkpoints.checkpoint import Checkpoint

_TURNED = frozenset({"q_proj", "k_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRows:
    """A `Checkpoint` whose pairs are side by side, read as if they were half a head apart."""

    stored: "Checkpoint"
    head_dim: int

    @property
    def plain(self) -> Collection[str]:
        """See `Checkpoint`."""
        return self.stored.plain

    @property
    def quantized(self) -> Collection[str]:
        """See `Checkpoint`."""
        return self.stored.quantized

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        return self._in_order(name.rpartition(".")[0], self.stored.tensor(name))

    def weight(self, module: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """See `Checkpoint`."""
        weight = self.stored.weight(module, shape)
        if isinstance(weight, Tensor):
            return self._in_order(module, weight)
        return replace(
            weight,
            codes=self._in_order(module, weight.codes),
            scales=self._in_order(module, weight.scales),
            offsets=None if weight.offsets is None else self._in_order(module, weight.offsets),
        )

    def _in_order(self, module: str, rows: Tensor) -> Tensor:
        if module.rpartition(".")[2] not in _TURNED:
            return rows
        if rows.shape[0] % self.head_dim:
            raise UnsupportedModel(f"{module} has {rows.shape[0]} rows, no multiple of head_dim {self.head_dim}")
        pairs = rows.reshape(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)
