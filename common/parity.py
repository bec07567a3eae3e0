"""Proof that two processes turn the same text into the same tokens: digests of the tokens of fixed texts.

Equal hashes mean equal KV only if equal texts mean equal tokens. A router and a worker with different tokenizers would
silently serve answers to other prompts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from common.chat_template import Conversation
from common.errors import InvalidRequest
from common.tokens import as_tokens

if TYPE_CHECKING:
    import tokenizers

PROBE_TEXT = (
    "The year 2026 has 365 days; 3.14159, 1e-9, 0x7f and 1234567890.  Two  spaces,\ttabs\r\nand\n\n\nlines. "
    "naïve Ünïcödé — “quotes”, 中文字符、日本語テキスト、한국어, العربية, हिन्दी. 👩‍👩‍👧‍👦🏳️‍🌈 🙂 "
    "def f(x):\n        return x ** 2  # <s> </s> <|im_start|> <|endoftext|> [INST] <|eot_id|> <unk> <pad> "
)
"""Digits, spaces, scripts, emoji of several code points, and text that looks like special tokens."""
PROBE_MESSAGES = (
    ("system", "You are terse."),
    ("user", "  What is 12 × 12?\n"),
    ("assistant", "144"),
    ("user", "And in 日本語? <|im_end|> 🙂"),
)
_PROBE_UNIX_S = int(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp())
"""A fixed time: templates may write the date, and two processes may be probed on different days."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProbes:
    """Digests of a process's tokens of the fixed texts."""

    tokenizer: bytes
    """Digest of the ids of `PROBE_TEXT`."""
    template: bytes
    """Digest of the ids of `PROBE_MESSAGES`, rendered by the chat template; empty without a template."""


NO_PROBES = TextProbes(tokenizer=b"", template=b"")


class Template(Protocol):
    """Renders a conversation."""

    def render(self, conversation: Conversation, *, rendered_unix_s: int) -> str:
        """Return the prompt. Raises InvalidRequest when the template refuses the conversation."""
        ...


def text_probes(tokenizer: "tokenizers.Tokenizer", template: Template | None) -> TextProbes:
    """Return the probes of a model's tokenizer, whose truncation and padding it turns off. Takes milliseconds."""
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, *, add_special_tokens: bool) -> Sequence[int]:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: Sequence[int] = encoding.ids
        return ids

    return TextProbes(
        tokenizer=_digest(encode(PROBE_TEXT, add_special_tokens=True)),
        template=b"" if template is None else _digest(encode(_conversation(template), add_special_tokens=False)),
    )


def byte_probes(template: Template) -> TextProbes:
    """Return the probes of a process whose tokens are the bytes of the text."""
    return TextProbes(
        tokenizer=_digest(PROBE_TEXT.encode()),
        template=_digest(_conversation(template).encode()),
    )


def find_text_mismatch(worker: TextProbes, router: TextProbes) -> str | None:
    """Return how a worker's text differs from the router's and the remedy; None when they agree."""
    if worker.tokenizer != router.tokenizer:
        return (
            f"tokenizer_probe {_differs(worker.tokenizer)}: worker and router make different tokens of one text;"
            " start both from the same model folder (tokenizer.json) and version of kvrelay"
        )
    if worker.template != router.template:
        return (
            f"template_probe {_differs(worker.template)}: worker and router write one conversation differently;"
            " start both from the same model folder (chat_template.jinja, tokenizer_config.json)"
        )
    return None


def _differs(probe: bytes) -> str:
    return "differs" if probe else "is missing"


def _conversation(template: Template) -> str:
    """Return the rendered conversation, or the template's refusal. Some templates accept no system message."""
    try:
        return template.render(Conversation.plain(PROBE_MESSAGES), rendered_unix_s=_PROBE_UNIX_S)
    except InvalidRequest:
        try:
            return template.render(Conversation.plain(PROBE_MESSAGES[1:]), rendered_unix_s=_PROBE_UNIX_S)
        except InvalidRequest as error:
            return error.message


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(as_tokens(token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()
