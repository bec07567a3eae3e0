"""Marks in prompts: where models' own templates put them, and what a mark may ask."""

import json
from typing import Any

import pytest

from common.chat_template import ChatTemplate
from common.errors import InvalidRequest
from kvrelay.v1 import inference_pb2 as pb
from router.reading.cache_marks import MarkFinder, check_marks
from router.reading.codec import ByteCodec, Codec
from router.reading.conversation import NO_FORMATS, read_conversation
from router.reading.token_cache import Encoded
from router.reading.tokenizer import TextCodec
from tests.common.chat.templates import TEMPLATES
from tests.router.test_token_cache import TEMPLATE, byte_level

TOOLS = [
    json.dumps({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}) for name in "ab"
]
TURNS = [
    ("system", "Know the library by heart.  "),
    ("user", "\nWhich book is the oldest?"),
    ("assistant", "The one without a name."),
    ("user", "And where is it?"),
]


def codec_of(source: str) -> TextCodec:
    tokens = {"bos_token": "", "eos_token": "<|end|>", "unk_token": ""}
    return TextCodec(byte_level(), ChatTemplate(source, special_tokens=tokens))


def asked(turns: list[tuple[str, str]], *marks: pb.CacheMark, tools: Any = ()) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, tools=tools), cache_marks=marks)


def found(codec: Codec, message: pb.GenerateRequest) -> tuple[list[int], Encoded]:
    """Return the tokens before each mark of a chat, and the prompt."""
    conversation = read_conversation(message.chat)
    encoded = codec.encode_chat_now(conversation, rendered_unix_s=0)
    finder = MarkFinder(codec, message, encoded)
    given = finder.in_chat(conversation, NO_FORMATS, lambda each: codec.render(each, rendered_unix_s=0))
    return [num_tokens for num_tokens, _ttl_s in given], encoded


def end(index: int, num_chars: int | None = None) -> pb.CacheMark:
    return pb.CacheMark(message=pb.MessageEnd(index=index, num_chars=num_chars), ttl_s=60)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_mark_covers_what_is_before_it_and_nothing_that_may_change(path: Any) -> None:
    codec = codec_of(path.read_text(encoding="utf-8"))
    turns = TURNS[1:] if "Nemo" in path.stem else TURNS  # that one puts what the system says before the last question
    marks = [end(index) for index in range(len(turns))]
    lengths, encoded = found(codec, asked(turns, *marks))
    assert lengths == sorted(lengths)
    for index, num_tokens in enumerate(lengths):
        said = turns[index][1].strip()
        if said in encoded.text:
            before = "".join(str(codec.tokenizer.id_to_token(each)) for each in encoded.token_ids[:num_tokens])
            assert before.replace("Ġ", " ").endswith((said, said[:-1]))
        # Another end of the conversation begins with the same tokens.
        others = [*turns[: index + 1], *((role, f"{role} {content} otherwise") for role, content in turns[index + 1 :])]
        other = codec.encode_chat_now(read_conversation(asked(others).chat), rendered_unix_s=0)
        assert other.token_ids[:num_tokens] == encoded.token_ids[:num_tokens]


def test_mark_ends_in_its_message_or_before_the_next_words() -> None:
    codec = ByteCodec()
    turns = [("user", "  two parts"), ("assistant", " "), ("user", "so")]
    (part, front, empty, last), encoded = found(codec, asked(turns, end(0, 5), end(0, 1), end(1), end(2)))
    text = codec.decode(encoded.token_ids)
    assert [text[:part], text[:front]] == ["user:   two", "user:   "]
    assert text[:empty].endswith("user: ") and text[:last].endswith("user: so")


def test_mark_of_tools_ends_with_the_last_marked_one() -> None:
    codec = ByteCodec()
    marks = [pb.CacheMark(num_tools=count, ttl_s=60) for count in (1, 2, 9)]
    (first, both, more), encoded = found(codec, asked(TURNS, *marks, tools=TOOLS))
    text = codec.decode(encoded.token_ids)
    assert text[:first].endswith('"parameters": {"type": "object"}}}') and '"b"' not in text[:first]
    assert both == more and '"b"' in text[:both] and "system" not in text[:both]
    assert found(codec, asked(TURNS, marks[0]))[0] == [0], "there are no tools"


def test_text_that_holds_the_finders_own_signs_only_spoils_its_own_marks() -> None:
    signs = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    message = asked([("user", f"a{signs}b"), ("user", "c")], end(0), pb.CacheMark(ttl_s=1))
    (spoilt, whole), encoded = found(ByteCodec(), message)
    assert (spoilt, whole) == (0, len(encoded.token_ids))


def test_places_are_found_by_the_last_cut_as_by_tokenizing_all() -> None:
    codec = codec_of(TEMPLATE)
    _lengths, encoded = found(codec, asked(TURNS))
    for num_chars in range(len(encoded.text) + 1):
        num_tokens = codec.num_leading_tokens(encoded.text, num_chars, encoded.token_ids)
        alone = codec.tokenizer.encode(encoded.text[:num_chars], add_special_tokens=False).ids
        differ = (i for i, (one, other) in enumerate(zip(alone, encoded.token_ids, strict=False)) if one != other)
        assert num_tokens == next(differ, len(alone)), num_chars


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="a", cache_marks=[pb.CacheMark()]), "cache_marks[0].ttl_s"),
        (pb.GenerateRequest(text="a", cache_marks=[pb.CacheMark(ttl_s=1e9)]), "cache_marks[0].ttl_s"),
        (pb.GenerateRequest(text="a", cache_marks=[pb.CacheMark(ttl_s=float("nan"))]), "cache_marks[0].ttl_s"),
        (pb.GenerateRequest(text="a", cache_marks=[pb.CacheMark(ttl_s=1, num_tokens=1)]), "cache_marks[0].num_tokens"),
        (asked(TURNS, end(4)), "cache_marks[0].message.index"),
    ],
)
def test_mark_that_cannot_be_is_refused_by_its_field(message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_marks(message)
    assert caught.value.field == field
