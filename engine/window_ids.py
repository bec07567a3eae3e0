"""Names of the window pages that travel with the blocks of a prompt."""

from dataclasses import dataclass

from common.ids import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowIds:
    """Window pages at the end of leading blocks of a prompt, as `KvStore` numbers them."""

    first_block: int = 0
    """Block of the first of them; each later one has the next."""
    ids: tuple[BlockId, ...] = ()


NO_WINDOWS = WindowIds()
