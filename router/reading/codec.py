"""The tokenizer interface of the router, and a codec without files for the fake engine: one token per byte."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from common.chat_template import Conversation, LineTemplate
from common.parity import TextProbes, byte_probes
from common.tokens import TokenArray, as_tokens
from router.reading.token_cache import Encoded

PROMPT_END_CHARS = 64
"""Characters of `Encoded.prompt_end`."""


class Codec(ABC):
    """Turns text into token ids. Any thread."""

    inline_chars: int
    """Text of so many characters is encoded in less time than a change of threads takes."""

    @property
    @abstractmethod
    def probes(self) -> TextProbes:
        """Results for the fixed texts; workers must have the same."""

    @property
    @abstractmethod
    def template_source(self) -> str | None:
        """Source of the chat template; None without one."""

    sampling_defaults: Mapping[str, float] = MappingProxyType({})
    """Sampling parameters that the model's makers recommend."""

    @abstractmethod
    def encode_now(self, text: str) -> TokenArray:
        """Return the ids of plain text. Raises InvalidRequest."""

    @abstractmethod
    def encode_chat_now(
        self, conversation: Conversation, *, rendered_unix_s: int, scope: bytes | None = None
    ) -> Encoded:
        """Return the ids of a conversation, rendered by the model's chat template.

        A template that writes the date writes that of `rendered_unix_s`, seconds since 1970, so the result depends on
        the arguments and the model alone. Beginnings are remembered for callers of the same scope; without a scope,
        not at all. Raises InvalidRequest when the template refuses the conversation.
        """

    @abstractmethod
    def render(self, conversation: Conversation, *, rendered_unix_s: int) -> str:
        """Return the text of a conversation that `encode_chat_now` encodes. Raises InvalidRequest."""

    @abstractmethod
    def num_leading_tokens(self, text: str, num_chars: int, token_ids: TokenArray) -> int:
        """Return how many ids of a rendered text lie within its first characters, and nowhere else."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this spelling; None if there is no such token."""

    @abstractmethod
    def decode_pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each id separately."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of consecutive ids, special tokens included; unknown ids have no text."""


_Text = TypeVar("_Text", str, TokenArray)


def num_alike(one: _Text, other: _Text) -> int:
    """Return the characters, or ids, with which both begin: some copies and comparisons of whole parts."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # `low` are alike, `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


NUM_BYTES = 256
_TEMPLATE = LineTemplate()


class ByteCodec(Codec):
    """Token id = byte value of the UTF-8 text."""

    inline_chars = 1 << 14
    probes = byte_probes(_TEMPLATE)
    template_source: str | None = _TEMPLATE.source

    def encode_now(self, text: str) -> TokenArray:
        """Return the bytes of `text`."""
        return as_tokens(text.encode())

    def encode_chat_now(
        self, conversation: Conversation, *, rendered_unix_s: int, scope: bytes | None = None
    ) -> Encoded:
        """Return the bytes of one `role: content` line per message and of the line that the answer continues."""
        text = self.render(conversation, rendered_unix_s=rendered_unix_s)
        return Encoded(as_tokens(text.encode()), prompt_end=text[-PROMPT_END_CHARS:], text=text)

    def render(self, conversation: Conversation, *, rendered_unix_s: int) -> str:
        """Return the lines."""
        return _TEMPLATE.render(conversation, rendered_unix_s=rendered_unix_s)

    def num_leading_tokens(self, text: str, num_chars: int, token_ids: TokenArray) -> int:
        """Return the bytes of the characters."""
        return len(text[:num_chars].encode())

    def token_id(self, token: str) -> int | None:
        """Return None: markup is bytes like all text."""
        return None

    def decode_pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the character of each byte, or U+FFFD; ids beyond bytes have no text."""
        return tuple(
            bytes([token_id]).decode(errors="replace") if token_id < NUM_BYTES else "" for token_id in token_ids
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the bytes; ids beyond bytes have no text."""
        return bytes(token_id for token_id in token_ids if token_id < NUM_BYTES).decode(errors="replace")
