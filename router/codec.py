"""What the router needs of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol

from common.parity import TextProbes
from common.tokens import TokenArray
from router.tenants import ANYBODY, Tenant
from router.token_cache import Encoded


class Codec(Protocol):
    """Turns text into token ids. Encoding runs off the event loop, in an order that is fair between tenants."""

    @property
    def probes(self) -> TextProbes:
        """What it makes of the fixed texts: workers have to make the same of them."""
        ...

    async def encode(self, text: str, *, tenant: Tenant = ANYBODY) -> TokenArray:
        """Return the ids of plain text."""
        ...

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        rendered_unix_s: int,
        tenant: Tenant = ANYBODY,
        scope: bytes | None = None,
    ) -> Encoded:
        """Return the ids of a conversation of (role, content), rendered by the model's chat template.

        A template that writes the date writes that of `rendered_unix_s`, seconds since 1970: nothing else than the
        arguments and the model decides what comes out.
        What it remembers of them it remembers for callers of the same scope; without one, nothing. Raises
        InvalidRequest when the template refuses it.
        """
        ...

    def decode_pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each id by itself."""
        ...

    async def pieces(self, token_ids: Sequence[int], *, tenant: Tenant = ANYBODY) -> tuple[str, ...]:
        """Return what `decode_pieces` does, for very many ids."""
        ...

    async def decode(self, token_ids: Sequence[int], *, tenant: Tenant = ANYBODY) -> str:
        """Return the text of consecutive ids, special tokens included; ids that are no tokens have none."""
        ...
