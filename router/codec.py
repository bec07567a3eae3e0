"""The tokenizer interface of the router."""

from collections.abc import Sequence
from typing import Protocol

from common.parity import TextProbes
from common.tokens import TokenArray
from router.tenants import ANYBODY, Tenant
from router.token_cache import Encoded


class Codec(Protocol):
    """Turns text into token ids. Encoding runs off the event loop, fair between tenants."""

    @property
    def probes(self) -> TextProbes:
        """Results for the fixed texts; workers must have the same."""
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

        A template that writes the date writes that of `rendered_unix_s`, seconds since 1970, so the result depends on
        the arguments and the model alone. Beginnings are remembered for callers of the same scope; without a scope,
        not at all. Raises InvalidRequest when the template refuses the conversation.
        """
        ...

    def decode_pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each id separately."""
        ...

    async def pieces(self, token_ids: Sequence[int], *, tenant: Tenant = ANYBODY) -> tuple[str, ...]:
        """Return the same as `decode_pieces`, off the event loop, for many ids."""
        ...

    async def decode(self, token_ids: Sequence[int], *, tenant: Tenant = ANYBODY) -> str:
        """Return the text of consecutive ids, special tokens included; unknown ids have no text."""
        ...
