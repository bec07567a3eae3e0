"""Keeps the texts of a conversation text: what spells a control token in them does not become that token.

Templates write control tokens as text, so a message that spells `<|im_end|>` would end its own turn and could begin
another one. Such spellings are broken after their first character before the template sees them; each part of a broken
text is tokenized by itself. Texts without such spellings are not changed.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain

import tokenizers

from common.chat.formats import REASONING_FORMATS
from common.chat_template import BREAK, check_unicode
from router.reading.token_cache import CutFinder

_SHAPES = (("<|", "|>"), ("<｜", "｜>"))
"""Ends of spellings that are control tokens even where a tokenizer does not call them special, as DeepSeek's roles."""

_THOUGHTS = {
    tag for each in REASONING_FORMATS.values() if not each.needs_special_tokens for tag in (each.open, each.close)
}
"""Left as they are: templates look for them in earlier answers."""

_PARTS_AT_ONCE = 256
"""Parts that one call of the tokenizer takes: nothing else runs while it turns them into its objects and back."""


class ControlTokens:
    """Control tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, cuts: CutFinder) -> None:
        self._tokenizer = tokenizer
        self._guard = cuts.any_token or ""
        """Stands before a part, since some tokenizers treat the first piece of a text differently."""
        added = tokenizer.get_added_tokens_decoder().values()
        spellings = {token.content for token in added if token.special or _is_shaped(token.content)}
        breakable = {each for each in spellings if len(each) > 1} - _THOUGHTS
        self._pattern = re.compile(_begins_with(breakable)) if breakable else None

    def broken(self, text: str) -> str:
        """Return a text with all spellings of control tokens broken, overlapping ones too. Raises InvalidRequest."""
        if BREAK in text:
            check_unicode(text, field="chat")
        parts, begin = [], 0
        while self._pattern is not None and (match := self._pattern.search(text, begin)):
            end = match.start() + 1
            parts.append(text[begin:end])
            begin = end
        return BREAK.join([*parts, text[begin:]])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each rendered text, parts of broken texts joined."""
        split = [text.split(BREAK) for text in texts]
        parts = [self._guard * (position > 0) + part for each in split for position, part in enumerate(each)]
        found = chain.from_iterable(
            self._tokenizer.encode_batch_fast(parts[start : start + _PARTS_AT_ONCE], add_special_tokens=False)
            for start in range(0, len(parts), _PARTS_AT_ONCE)
        )
        num_guards = int(bool(self._guard))
        return [
            [token_id for i in range(len(each)) for token_id in next(found).ids[num_guards if i else 0 :]]
            for each in split
        ]


def _is_shaped(spelling: str) -> bool:
    return any(spelling.startswith(opening) and spelling.endswith(closing) for opening, closing in _SHAPES)


def _begins_with(spellings: Collection[str]) -> str:
    """Return a regular expression for the shortest of the spellings at a place, found without trying each of them.

    A tokenizer may have hundreds that differ at their ends alone.
    """
    if "" in spellings:
        return ""
    ends = defaultdict[str, list[str]](list)
    for each in spellings:
        ends[each[0]].append(each[1:])
    branches = [re.escape(first) + _begins_with(rest) for first, rest in sorted(ends.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
