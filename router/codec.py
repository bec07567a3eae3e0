"""What the router needs of a tokenizer."""

from collections.abc import Sequence
from typing import Protocol

from common.parity import TextProbes
from common.tokens import TokenArray
from router.token_cache import Encoded


class Codec(Protocol):
    """Turns text into token ids. Encoding runs off the event loop."""

    @property
    def probes(self) -> TextProbes:
        """What it makes of the fixed texts: workers have to make the same of them."""
        ...

    async def encode(self, text: str) -> TokenArray:
        """Return the ids of plain text."""
        ...

    async def encode_chat(
        self, messages: Sequence[tuple[str, str]], *, rendered_unix_s: int, scope: bytes | None = None
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

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of consecutive ids, special tokens included; ids that are no tokens have none."""
        ...
