"""Writes grammars as Lark sources for llguidance (engine/text/grammar.py).

Llguidance never lets text stand for a token that the tokenizer keeps apart (an added token), nor the other way round,
unless nothing else may follow. So `token_ids` gives the ids of the markers that are tokens of the model's tokenizer
(`{marker: id}`, of common/chat/formats.py's MARKERS); other markers are written as text.
"""

import json
import re
from collections.abc import Mapping

TokenIds = Mapping[str, int]

NO_TOKENS: TokenIds = {}


class Rules:
    """Rules of a grammar."""

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self._tokens = re.compile("(" + "|".join(map(re.escape, token_ids)) + ")")
        self._rules: list[str] = []

    @property
    def lark(self) -> str:
        """The source."""
        return "\n".join([*self._rules, ""])

    @property
    def num_rules(self) -> int:
        """Rules so far."""
        return len(self._rules)

    def add(self, name: str, body: str) -> None:
        """Add a rule or, by a name in capitals, a terminal."""
        self._rules.append(f"{name}: {body}")

    def add_new(self, body: str, *, attribute: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{self.num_rules}"
        self.add(f"{name}{attribute}", body)
        return name

    def spelled(self, text: str) -> str:
        """Return the expression of a text, in which markers that are tokens are these tokens."""
        parts = self._tokens.split(text) if self.token_ids else [text]
        return " ".join(
            f"<[{self.token_ids[part]}]>" if part in self.token_ids else quoted(part) for part in parts if part
        )


def quoted(text: str) -> str:
    """Return the expression of a text."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """Return the regular expression of a text, as it stands between slashes."""
    return slashes_escaped(re.escape(text).replace("\\\n", "\n"))


def slashes_escaped(regex: str) -> str:
    """Return a regular expression as it stands between slashes."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")
