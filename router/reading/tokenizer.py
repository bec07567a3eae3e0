"""The model's tokenizer and chat template, read from its folder. No torch, no transformers.

Tokenizing 64 kB takes 11 ms. The library's `encode` and `decode` hold the interpreter lock all that time, those for
batches release it: on a thread (fair_threads.py) the latter leave the event loop alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers

from common.chat_template import BREAK, ChatTemplate, Conversation, check_unicode
from common.errors import InvalidRequest
from common.parity import TextProbes, text_probes
from common.text_files import load_chat_template, load_sampling_defaults, load_tokenizer
from common.tokens import TokenArray, as_tokens, token_view
from router.reading.codec import PROMPT_END_CHARS, Codec, num_alike
from router.reading.control_tokens import ControlTokens
from router.reading.token_cache import MIN_CACHED_TOKENS, CutFinder, Encoded, KnownPrefix, TokenCache

DEFAULT_CACHE_MIB = 64
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCodec(Codec):
    """Turns text and conversations into the token ids of transformers' tokenizer, and ids into text. Any thread."""

    inline_chars = 0

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        cache_mib: int = DEFAULT_CACHE_MIB,
        min_cached_tokens: int = MIN_CACHED_TOKENS,
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.sampling_defaults = sampling_defaults
        self._min_cached_tokens = min_cached_tokens
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._cuts = CutFinder(tokenizer)
        self._control_tokens = ControlTokens(tokenizer, self._cuts)
        self._cache = TokenCache(max_bytes=cache_mib << 20)
        self._pieces: dict[int, str] = {}

    @classmethod
    def load(
        cls, model_dir: Path, *, chat_template: Path | None = None, cache_mib: int = DEFAULT_CACHE_MIB
    ) -> "TextCodec":
        """Read a Hugging Face folder; blocks for more than 100 ms. Raises CannotStart when it is unusable."""
        return cls(
            load_tokenizer(model_dir),
            load_chat_template(model_dir, own=chat_template),
            cache_mib=cache_mib,
            sampling_defaults=load_sampling_defaults(model_dir),
        )

    @cached_property
    def probes(self) -> TextProbes:
        """Results for the fixed texts."""
        return text_probes(self.tokenizer, self._chat_template)

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's logits may have more entries."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def template_source(self) -> str | None:
        """Source of the chat template; None without one, when no conversation can be encoded."""
        return None if self._chat_template is None else self._chat_template.source

    def encode_now(self, text: str) -> TokenArray:
        """Return the ids of plain text, with the special tokens that the model expects. Raises InvalidRequest."""
        check_unicode(text, field="text")
        return self._encode(text)

    def encode_chat_now(
        self, conversation: Conversation, *, rendered_unix_s: int, scope: bytes | None = None
    ) -> Encoded:
        """Return the ids of a conversation, up to where the assistant's answer begins.

        Special tokens are those that the template writes, never those that a text of the conversation spells; the date
        is that of `rendered_unix_s`. The part that an earlier call of the same scope has tokenized is not tokenized
        again; without a scope everything is. Raises InvalidRequest that names the field.
        """
        text = self.render(conversation, rendered_unix_s=rendered_unix_s)
        end = text[-PROMPT_END_CHARS:].replace(BREAK, "")
        return replace(self._encode_on(text, scope), prompt_end=end, text=text)

    def render(self, conversation: Conversation, *, rendered_unix_s: int) -> str:
        """Return the text of a conversation, in which BREAK may be. Raises InvalidRequest that names the field."""
        if self._chat_template is None:
            raise InvalidRequest(
                "the model has no chat template; send a text (/v1/completions, `kvrelay generate --raw`), or serve it"
                " with model.chat_template",
                field="chat",
            )
        return self._chat_template.render(
            conversation, rendered_unix_s=rendered_unix_s, marked=self._control_tokens.broken
        )

    def num_leading_tokens(self, text: str, num_chars: int, token_ids: TokenArray) -> int:
        """Return how many ids of a rendered text lie within its first characters.

        Only what is behind the last cut before the place is tokenized: each cut is a token that stands nowhere else.
        """
        cuts = self._cuts.find(text)
        num_before = sum(cut.end <= num_chars for cut in cuts)
        places = np.flatnonzero(np.isin(token_view(token_ids), [cut.token_id for cut in cuts]))
        if not num_before or len(places) != len(cuts):
            return num_alike(token_ids, self._encode_whole(text[:num_chars]).token_ids)
        begin, place = cuts[num_before - 1].start, int(places[num_before - 1])
        (ids,) = self._control_tokens.encode([text[begin:num_chars]])
        return place + num_alike(token_ids[place:], as_tokens(ids))

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this spelling; None if there is no such token."""
        return self.tokenizer.token_to_id(token)

    def decode_pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each id with its leading space; part of a character shows as U+FFFD."""
        return tuple(self._piece(token_id) for token_id in token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of consecutive ids, special tokens included; unknown ids have no text."""
        (text,) = self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    def _encode(self, text: str) -> TokenArray:
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=True)
        return as_tokens(encoding.ids)

    def _encode_whole(self, text: str) -> Encoded:
        (token_ids,) = self._control_tokens.encode([text])
        return Encoded(as_tokens(token_ids))

    def _encode_on(self, text: str, scope: bytes | None) -> Encoded:
        """Tokenize a rendered conversation from the end of its known beginning."""
        cuts = self._cuts.find(text) if scope is not None else []
        if scope is None or not cuts:
            return self._encode_whole(text)
        digests = self._cache.digests(text, cuts, scope=scope)
        found = self._cache.find(digests)
        place, known = found if found is not None else (-1, None)
        # From the known beginning to the last cut, which is kept for the next turn; and from there to the end.
        begins = [cuts[place] if known is not None else None, cuts[-1]]
        texts = [text[begins[0].start if begins[0] is not None else 0 : cuts[-1].end], text[cuts[-1].start :]]
        if place == len(cuts) - 1:
            begins, texts = begins[1:], texts[1:]
        token_ids = known.token_ids[:] if known is not None else as_tokens(())
        kept = known
        for number, (begin, ids) in enumerate(zip(begins, self._control_tokens.encode(texts), strict=True)):
            if begin is not None and ids[:1] != [begin.token_id]:
                return self._encode_whole(text)  # this tokenizer cannot be cut there
            token_ids.extend(as_tokens(ids if begin is None else ids[1:]))
            is_first_of_two = number == 0 and len(texts) == 2
            if is_first_of_two and len(token_ids) >= self._min_cached_tokens:
                kept = KnownPrefix(token_ids[:])
                self._cache.keep(digests[-1], kept)
        return Encoded(token_ids, known, kept)

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            once = self.tokenizer.decode([token_id], skip_special_tokens=False)
            twice = self.tokenizer.decode([token_id, token_id], skip_special_tokens=False)
            # Some decoders strip the space before the first token: the second one shows it.
            self._pieces[token_id] = once if _REPLACEMENT in twice else twice[len(once) :]
        return self._pieces[token_id]
