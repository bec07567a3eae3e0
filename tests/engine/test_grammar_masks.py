"""The tokens that a grammar allows are those of a brute-force search, and any walk over them ends in a valid answer."""

import itertools
import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.fake_tokenizer import EOS_TOKEN_ID
from common.structured_outputs import structure_text
from engine.text.grammar import Grammar, Grammars
from tests.builders import FAKE_GRAMMARS
from tests.engine.schemas import random_schema

_TOKENS = ["a", "b", "c", "ab", "ba", "abc", "cc", "aab"]
_EOS = len(_TOKENS)
MAX_WALK = 600
NUM_SCHEMAS = 200


def _tiny() -> Grammars:
    """Return a compiler for nine tokens, several of which spell the same text together."""
    vocabulary = {token: idx for idx, token in enumerate([*_TOKENS, "<end>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Grammars(tokenizer, vocab_size=len(vocabulary), eos_token_ids=frozenset((_EOS,)))


TINY = _tiny()
_words = st.text(alphabet="abc", min_size=1, max_size=5)


@given(
    languages=st.lists(st.lists(_words, min_size=1, max_size=3, unique=True), min_size=1, max_size=3), data=st.data()
)
@settings(max_examples=60)
def test_allowed_tokens_are_those_that_some_word_of_the_language_goes_on_with(
    languages: list[list[str]], data: st.DataObject
) -> None:
    words = {"".join(parts) for parts in itertools.product(*languages)}
    regex = "".join(f"({'|'.join(each)})" for each in languages)
    state = TINY.compile(structure_text({"regex": regex})).begin()
    output: list[int] = []
    while True:
        text = "".join(_TOKENS[token_id] for token_id in output)
        expected = {idx for idx, token in enumerate(_TOKENS) if any(word.startswith(text + token) for word in words)}
        expected |= {_EOS} if text in words else set()
        allowed = set(np.flatnonzero(state.allowed(output)).tolist())
        next_characters = {word[len(text)] for word in words if word.startswith(text) and word != text}
        if text in words or len(next_characters) > 1:
            assert allowed == expected
        else:  # where the text is forced, one way of spelling it is enough
            assert allowed
            assert allowed <= expected
        token_id = data.draw(st.sampled_from(sorted(allowed)))
        if token_id == _EOS:
            return
        output.append(token_id)


def _walk(grammar: Grammar, chance: random.Random) -> list[int] | None:
    """Return an answer by chance, without its end; None for one that is too long."""
    state, output = grammar.begin(), list[int]()
    while len(output) < MAX_WALK:
        allowed = np.flatnonzero(state.allowed(output))
        token_id = EOS_TOKEN_ID if state.is_complete and chance.random() < 0.5 else int(chance.choice(allowed))
        if token_id == EOS_TOKEN_ID:
            return output
        output.append(token_id)
    return None


def test_every_finished_walk_over_the_grammars_of_200_schemas_is_valid() -> None:
    num_finished, refused = 0, dict[int, str]()
    for seed in range(NUM_SCHEMAS):
        schema: Any = random_schema(seed)
        try:
            grammar = FAKE_GRAMMARS.compile(structure_text({"json": schema}))
        except InvalidRequest as error:
            refused[seed] = error.message
            continue
        output = _walk(grammar, random.Random(seed))
        if output is not None:
            num_finished += 1
            text = bytes(output).decode()
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (seed, schema, text)
    assert num_finished > 0.8 * NUM_SCHEMAS
    assert len(refused) < 0.02 * NUM_SCHEMAS, refused
