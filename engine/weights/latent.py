"""Latent attention (arXiv:2405.04434): what config.json says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.weights.config_json import MAX_SIZE, UnsupportedModel, positive

LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever config.json says of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Shapes of attention whose pages hold one row for a token: what all heads make their keys and values from."""

    query_rank: int | None
    """Values that a token's queries are made from; None: its hidden state."""
    rank: int
    """Values of a row that keys and values are made from."""
    rope_dim: int
    """Values of a query that are rotated, and of a row: the part of the key that all heads share."""
    nope_dim: int
    """The other values of a query, and of a head's key."""
    value_dim: int
    """Values of a head's value."""
    has_interleaved_pairs: bool
    """Whether rotary pairs lie side by side, and not half of `rope_dim` apart."""

    @property
    def row_size(self) -> int:
        """Values of a row."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Values of a query, and of a head's key."""
        return self.nope_dim + self.rope_dim

    @property
    def expands_from(self) -> int:
        """Queries of one sequence from which making keys and values for all heads is less arithmetic than without."""
        saved = 2 * self.row_size - self.query_dim - self.value_dim  # for each query and key
        return -(-self.rank * (self.nope_dim + self.value_dim) // max(1, saved))


def parse_latent(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the latent attention that a config.json describes. Raises UnsupportedModel."""
    rope_dim = positive(raw, "qk_rope_head_dim", at_most=MAX_SIZE)
    if rope_dim % 2:
        raise UnsupportedModel(f"qk_rope_head_dim: {rope_dim} is odd; rotary embedding turns pairs")
    return LatentConfig(
        query_rank=None if raw.get("q_lora_rank") is None else positive(raw, "q_lora_rank", at_most=MAX_SIZE),
        rank=positive(raw, "kv_lora_rank", at_most=MAX_SIZE),
        rope_dim=rope_dim,
        nope_dim=positive(raw, "qk_nope_head_dim", at_most=MAX_SIZE),
        value_dim=positive(raw, "v_head_dim", at_most=MAX_SIZE),
        has_interleaved_pairs=bool(raw.get("rope_interleave", True)),
    )
