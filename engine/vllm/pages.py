"""Order of the elements in a page of vLLM's attention on CPUs, whose kernels keep keys transposed.

It depends on the processor. It is not written down here but learned at start: a rank writes numbered elements with the
backend's own operation and looks where they land. Pages of equal orders are exchangeable.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_DIGIT = 256  # integers below it are exact in every dtype of pages


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrder:
    """Order of the elements in a head page."""

    elements: tuple[int, ...]
    """Element at each place: token * head_dim + dimension for keys, block_size * head_dim more for values."""

    def digest(self) -> str:
        """Return a name that equal orders share."""
        return hashlib.blake2b(np.array(self.elements, dtype="<u4").tobytes(), digest_size=8).hexdigest()


def learn_head_order(layer: Any, *, block_size: int, head_dim: int) -> HeadOrder:
    """Return the order of a head page's elements, by writing numbered ones with the backend's own operation."""
    num_heads = layer.impl.num_kv_heads
    half = block_size * head_dim
    found = torch.zeros(2 * half, dtype=torch.int64)
    scale = 1
    while scale < 2 * half:
        pages = torch.zeros(2, num_heads, block_size, 2 * head_dim, dtype=layer.kv_cache.dtype)
        numbered = (torch.arange(2 * half) // scale % _DIGIT).to(pages.dtype).view(2, block_size, 1, head_dim)
        keys, values = (each.expand(-1, num_heads, -1).contiguous() for each in numbered)
        layer.impl.do_kv_cache_update(layer, keys, values, pages, torch.arange(block_size, 2 * block_size))
        found += pages[1, 0].reshape(-1).to(torch.int64) * scale
        scale *= _DIGIT
    return HeadOrder(elements=tuple(found.tolist()))
