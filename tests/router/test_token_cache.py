"""The token cache: results equal those of tokenizing everything."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from common.block_hash import hash_blocks, hash_root
from common.chat_template import ChatTemplate, Conversation
from common.tokens import as_tokens
from router.reading.token_cache import CutFinder, Encoded, KnownPrefix, TokenCache
from router.reading.tokenizer import TextCodec

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"  # ChatML
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "to be or not to be", "日本語 café — naïve", "a  b\n\nc   d"]
ROOT = hash_root(model_fingerprint="model")
SCOPE = b"tenant a"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace() -> tokenizers.Tokenizer:
    """Only the first piece of a text gets a leading space."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(tokenizer)


def prepending() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    return trained(tokenizer)


def trained(tokenizer: tokenizers.Tokenizer, *, initial_alphabet: Sequence[str] = ()) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<|start|>", "<|end|>"],
        initial_alphabet=list(initial_alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    greedy = [
        tokenizers.AddedToken("<|trim|>", special=True, lstrip=True, rstrip=True),
        tokenizers.AddedToken("<|en", special=True),  # a longer one begins with it
        tokenizers.AddedToken("the", special=False, normalized=True),
        tokenizers.AddedToken("d><|end|>", special=False, normalized=False),  # takes the beginning of another one
    ]
    tokenizer.add_special_tokens(greedy[:2])
    tokenizer.add_tokens(greedy[2:])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace(), "prepending": prepending()}
WORDS = ["the ", " fox", "\n", "  ", "日本", "é", "café", "q", ""]
MARKS = ["<|end|>", "<|start|>", "<|trim|>", "<|en", "d>", "|>", "<"]
CONTENT = st.lists(st.sampled_from(WORDS + MARKS), max_size=6).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), CONTENT), min_size=1, max_size=6)


def codec_for(name: str, *, cache_mib: int = 1) -> TextCodec:
    template = ChatTemplate(TEMPLATE, special_tokens={})
    return TextCodec(TOKENIZERS[name], template, cache_mib=cache_mib, min_cached_tokens=1)


def encode(codec: TextCodec, messages: Sequence[tuple[str, str]], scope: bytes | None) -> Encoded:
    return codec.encode_chat_now(Conversation.plain(messages), rendered_unix_s=0, scope=scope)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=25, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=4), st.integers(1, 5))
def test_encode_chat_turn_by_turn_equals_tokenizing_everything(
    name: str, chats: list[list[tuple[str, str]]], block_size: int
) -> None:
    codec = codec_for(name)
    for chat in chats:
        for num_turns in range(1, len(chat) + 1):
            found, plain = encode(codec, chat[:num_turns], SCOPE), encode(codec, chat[:num_turns], None)
            assert found.token_ids == plain.token_ids
            hashes = hash_blocks(plain.token_ids, root=ROOT, block_size=block_size)
            assert found.hashes(root=ROOT, block_size=block_size) == hashes


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_encode_chat_of_a_next_turn_goes_on_from_the_turn_before(name: str) -> None:
    codec = codec_for(name)
    first = encode(codec, [("user", "to be or not")], SCOPE)
    assert first.known is None
    assert first.kept is not None
    second = encode(codec, [("user", "to be or not"), ("assistant", "to be"), ("user", "?")], SCOPE)
    assert second.known is first.kept
    again = encode(codec, [("user", "to be or not"), ("assistant", "to be"), ("user", "?")], SCOPE)
    assert again.known is again.kept is second.kept


def test_cached_chat_of_a_dated_template_is_used_only_for_the_same_time() -> None:
    dated = ChatTemplate("<|start|>{{ strftime_now('%d %b') }}<|end|>" + TEMPLATE, special_tokens={})
    codec = TextCodec(TOKENIZERS["byte level"], dated, min_cached_tokens=1)
    chat, today_s, tomorrow_s = [("user", "to be or not")], 1_800_000_000, 1_800_086_400

    def encode_at(rendered_unix_s: int, scope: bytes | None) -> Encoded:
        return codec.encode_chat_now(Conversation.plain(chat), rendered_unix_s=rendered_unix_s, scope=scope)

    first, other, again = (encode_at(unix_s, SCOPE) for unix_s in (today_s, tomorrow_s, today_s))
    assert again.token_ids == first.token_ids == encode_at(today_s, None).token_ids
    assert other.token_ids == encode_at(tomorrow_s, None).token_ids != first.token_ids
    assert other.known is None
    assert again.known is first.kept is not None


def test_encode_chat_in_another_scope_knows_nothing() -> None:
    codec = codec_for("byte level")
    encode(codec, [("user", "to be or not")], SCOPE)
    assert encode(codec, [("user", "to be or not")], b"tenant b").known is None
    assert encode(codec, [("user", "to be or not")], None).known is None


def test_encode_chat_without_memory_keeps_nothing() -> None:
    codec = codec_for("byte level", cache_mib=0)
    encode(codec, [("user", "to be or not")], SCOPE)
    assert encode(codec, [("user", "to be or not")], SCOPE).known is None


def test_cached_hashes_of_another_root_are_not_used() -> None:
    codec = codec_for("byte level")
    chat = [("user", "the quick brown fox")]
    encode(codec, chat, SCOPE).hashes(root=hash_root(model_fingerprint="other"), block_size=2)
    found = encode(codec, chat, SCOPE)
    assert found.known is not None
    assert found.hashes(root=ROOT, block_size=2) == hash_blocks(found.token_ids, root=ROOT, block_size=2)


def test_cuts_lie_behind_special_tokens_that_stand_by_themselves() -> None:
    cuts = CutFinder(TOKENIZERS["byte level"])
    text = "<|start|>a<|end|> <|trim|> <|en b d><|end|> the"
    assert [text[: cut.end] for cut in cuts.find(text)] == ["<|start|>", "<|start|>a<|end|>"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400)), max_size=40))
def test_cache_never_holds_more_than_its_bound(uses: list[tuple[int, int]]) -> None:
    cache = TokenCache(max_bytes=5000)
    for name, num_tokens in uses:
        cache.keep(bytes([name]), KnownPrefix(as_tokens(range(num_tokens))))
        assert cache.num_bytes <= 5000
        if num_tokens < 300:
            assert cache.find([b"unknown", bytes([name]), b"later"]) is not None
