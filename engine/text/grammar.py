"""Grammars that answers must follow, by llguidance, and the tokens that they allow next.

A grammar's state after some tokens is a function of the grammar and these tokens. It is derived from a sequence's own
output whenever it is needed and kept only to save work, so that a handoff, a preemption or a resume on another worker
has nothing to carry: the new sequence reads its tokens again (0.5 ms for 500 of them).

A hostile grammar can compile for minutes, fill the memory or overflow the stack. So a worker tries each new one in
another process first (engine/text/grammar_trial.py).
"""

import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from common.errors import InvalidRequest
from common.schemas import guided, listed
from common.structured_outputs import FIELD, Structure, read_structure
from engine.text.digit_runs import DigitRuns

logger = logging.getLogger(__name__)

LARGE_VOCABULARY = 1 << 17
"""Tokens of a vocabulary that takes a second or more to read."""
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 40_000,
    "step_max_items": 10_000,
    "max_lexer_states": 40_000,
}
"""Bounds of llguidance on the work and the memory of one grammar, well below its defaults: a mask is computed between
two steps of all answers."""

Allowed = npt.NDArray[np.bool_]
"""For each token of the vocabulary, whether it may come next."""


class GrammarState:
    """The state of one sample's grammar. Engine thread only, once its sequence has entered."""

    def __init__(self, matcher: Any, grammar: "Grammar") -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._num_read = 0
        self._num_digits = 0
        """Digits with which the tokens read end."""
        self._allowed: Allowed | None = None
        """The tokens that may follow those read; None before the first look."""
        self.is_complete = False
        """Whether the answer may end where it was when the tokens were last asked for."""

    @property
    def error(self) -> str:
        """Reason why the grammar cannot go on; empty while it can."""
        return _reason(self._matcher.get_error())

    def allowed(self, output: Sequence[int]) -> Allowed:
        """Return the tokens that may follow an output that begins with the tokens read before. Do not change it.

        Where the answer is complete, and where the grammar exceeds its limits, only the end may follow.
        """
        new = output[self._num_read : len(output)]
        if self._allowed is not None and not len(new):
            return self._allowed
        if len(new):
            self._matcher.consume_tokens([int(token_id) for token_id in new])
            self._num_read += len(new)
            self._num_digits = self._grammar.num_digits_after(self._num_digits, new)
        self._allowed = self._compute()
        return self._allowed

    def allowed_along(self, output: Sequence[int], draft: Sequence[int]) -> list[Allowed]:
        """Return `allowed` behind an output, then behind each token of a draft that may follow it."""
        masks = [self.allowed(output)]
        if draft:
            ahead = GrammarState(self._matcher.deep_copy(), self._grammar)
            ahead._num_digits = self._num_digits
            masks += [ahead.allowed(draft[: i + 1]) for i in range(len(draft))]
        return masks

    def num_following(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many leading tokens of a draft may follow an output, one after the other."""
        self.allowed(output)
        if self._matcher.is_stopped() or self._matcher.is_error():
            return 0
        num_valid = int(self._matcher.validate_tokens([int(token_id) for token_id in draft]))
        if not self._grammar.may_bound(self._num_digits, draft[:num_valid]):
            return num_valid
        masks = self.allowed_along(output, draft[:num_valid])
        return next((i for i, token_id in enumerate(draft[:num_valid]) if not masks[i][token_id]), num_valid)

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the only token that may follow an output, which every way of sampling chooses; None if several may."""
        allowed = self.allowed(output)
        return int(allowed.argmax()) if np.count_nonzero(allowed) == 1 else None

    def _compute(self) -> Allowed:
        mask = b"" if self._matcher.is_stopped() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            logger.warning("a structured answer is cut: %s", self.error)
            self.is_complete = False
            return self._grammar.only_end
        self.is_complete = bool(self._matcher.is_accepting())
        if not mask:
            return self._grammar.only_end
        bits = np.frombuffer(mask, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        return self._grammar.bounded(allowed, self._num_digits) if allowed.any() else self._grammar.only_end


class Grammar:
    """A compiled grammar. Any thread."""

    def __init__(
        self, matcher: Any, *, vocab_size: int, eos_token_ids: frozenset[int], digits: DigitRuns | None = None
    ) -> None:
        """With `digits`, numbers do not go on forever."""
        self._matcher = matcher
        self._digits = digits
        self.vocab_size = vocab_size
        self.only_end: Allowed = np.zeros(vocab_size, dtype=np.bool_)
        self.only_end[list(eos_token_ids)] = True

    def num_digits_after(self, num_digits: int, token_ids: Sequence[int]) -> int:
        """Return how many digits an answer ends with after the tokens; 0 where numbers may go on."""
        return 0 if self._digits is None else self._digits.after(num_digits, token_ids)

    def may_bound(self, num_digits: int, token_ids: Sequence[int]) -> bool:
        """Return whether a number may end within tokens because it is too long."""
        return self._digits is not None and self._digits.may_bound(num_digits, token_ids)

    def bounded(self, allowed: Allowed, num_digits: int) -> Allowed:
        """Return the tokens of a mask that may follow so many digits."""
        return allowed if self._digits is None else self._digits.bounded(allowed, num_digits)

    def begin(self) -> GrammarState:
        """Return the state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self)

    def check(self, output: Sequence[int]) -> None:
        """Raise InvalidRequest unless an answer may begin with these tokens. Takes longer the longer they are."""
        if not output:
            return
        matcher = self._matcher.deep_copy()
        num_valid = matcher.try_consume_tokens([int(token_id) for token_id in output])
        if num_valid < len(output):
            raise InvalidRequest(f"output token {num_valid} does not follow structured_outputs", field=FIELD)


class Grammars:
    """Compiles structures for one tokenizer. Any thread but an event loop's.

    A large vocabulary is read at once: that holds all threads of the process up for seconds, for which routers would
    give a worker up. A smaller one is read for the first structure.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        """Held while the vocabulary is read."""
        if vocab_size >= LARGE_VOCABULARY:
            with suppress(InvalidRequest):  # which the first structure gets
                _ = self._known, self._digits

    @property
    def description(self) -> dict[str, Any]:
        """JSON values from which another process makes the same compiler."""
        eos = sorted(self._eos_token_ids)
        return {"tokenizer": self._tokenizer.to_str(), "vocab_size": self._vocab_size, "eos_token_ids": eos}

    @classmethod
    def described(cls, description: dict[str, Any]) -> "Grammars":
        """Invert `description`."""
        tokenizer = tokenizers.Tokenizer.from_str(description["tokenizer"])
        eos_token_ids = frozenset(description["eos_token_ids"])
        return cls(tokenizer, vocab_size=description["vocab_size"], eos_token_ids=eos_token_ids)

    def compile(self, text: str) -> Grammar:
        """Return the grammar of a structure's JSON text: usually within 5 ms. Raises InvalidRequest.

        Its first mask is computed, too, which is where most unusable grammars fail.
        """
        import llguidance  # 20 MB that only structured answers need

        structure = read_structure(text)
        with self._lock:
            known = self._known
        try:
            source = _source(structure, self._tokenizer)
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs cannot be compiled: {error}", field=FIELD) from None
        limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # its fields have several types
        matcher = llguidance.LLMatcher(known, source, log_level=0, limits=limits)
        if not matcher.is_error():
            grammar = Grammar(
                matcher,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                digits=self._digits if _holds_json(structure) else None,
            )
            state = grammar.begin()
            state.allowed(())
            if not state.error:
                return grammar
            reason = state.error
        else:
            reason = _reason(matcher.get_error())
        raise InvalidRequest(f"structured_outputs cannot be compiled: {structure.kind}: {reason}", field=FIELD)

    @cached_property
    def _digits(self) -> DigitRuns:
        return DigitRuns(self._tokenizer, vocab_size=self._vocab_size)

    @cached_property
    def _known(self) -> Any:
        """The tokenizer as llguidance knows it."""
        import llguidance

        eos = sorted(self._eos_token_ids)
        try:
            return llguidance.LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        except ValueError as error:
            raise InvalidRequest(f"this model takes no structured_outputs: {error}", field=FIELD) from None


def _holds_json(structure: Structure) -> bool:
    """Return whether a structure has numbers of JSON, whose digits no client has asked for one by one."""
    return structure.kind in ("json", "json_object", "structural_tag") or (
        structure.kind == "grammar" and "%json" in structure.value
    )


def _source(structure: Structure, tokenizer: tokenizers.Tokenizer) -> str:
    """Return llguidance's source of a structure. Raises ValueError."""
    from llguidance import LLMatcher

    value = structure.value
    match structure.kind:
        case "json":
            if (texts := listed(value)) is not None:
                return _choice_source(texts)
            return LLMatcher.grammar_from_json_schema(json.dumps(guided(value)))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(guided({"type": "object"})))
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return _choice_source(value)
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "structural_tag":
            return _tags_source(value, tokenizer)


def _choice_source(texts: Sequence[str]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def _tags_source(value: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> str:
    """Return the source of free text with structures behind its triggers. Raises ValueError."""
    from llguidance import LLMatcher, StructTag

    triggers = [trigger for trigger in value["triggers"] if trigger.startswith("<") and trigger.endswith(">")]
    are_tokens = {tokenizer.token_to_id(trigger) is not None for trigger in triggers}
    if len(are_tokens) > 1:
        raise ValueError("structural_tag: some triggers are tokens of this model and others are not")
    tags = [
        StructTag(
            trigger=max((each for each in value["triggers"] if tag["begin"].startswith(each)), key=len),
            begin=tag["begin"],
            grammar=guided(tag["schema"]),
            end=tag["end"],
        )
        for tag in value["structures"]
    ]
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=are_tokens == {True}))


def _reason(error: str) -> str:
    """Return what a compiler says in one line, with the fault of a regex, which it tells below the place."""
    first, *rest = str(error).splitlines() or [""]
    fault = next((line for line in rest if line.startswith("error: ")), "")
    return f"{first} {fault.removeprefix('error: ')}".rstrip()
