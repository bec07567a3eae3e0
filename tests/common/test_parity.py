"""Processes that disagree about text do not serve together."""

from datetime import UTC, datetime

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from common.chat_template import ChatTemplate, Conversation, LineTemplate
from common.fake_tokenizer import byte_tokenizer
from common.parity import PROBE_TEXT, byte_probes, find_text_mismatch, text_probes


def make_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={})


PLAIN = make_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def test_byte_tokenizer_and_plain_bytes_have_equal_probes() -> None:
    assert text_probes(byte_tokenizer(), LineTemplate()) == byte_probes(LineTemplate())


def test_truncation_and_padding_of_a_tokenizer_do_not_change_its_probe() -> None:
    cutting = byte_tokenizer()
    cutting.enable_truncation(5)
    cutting.enable_padding(length=4096)
    assert text_probes(cutting, None) == text_probes(byte_tokenizer(), None)


def with_token(token: str) -> tokenizers.Tokenizer:
    assert token in PROBE_TEXT
    other = byte_tokenizer()
    other.add_special_tokens([token])
    return other


def with_single_digits() -> tokenizers.Tokenizer:
    single = tokenizers.Tokenizer(models.BPE(vocab=byte_tokenizer().get_vocab(), merges=[]))
    single.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    return single


@pytest.mark.parametrize(
    "other",
    [*map(with_token, ["日本語", "<|im_start|>", "  ", "1234567890", "🏳️‍🌈"]), with_single_digits()],
)
def test_tokenizers_that_differ_have_different_probes(other: tokenizers.Tokenizer) -> None:
    why = find_text_mismatch(text_probes(other, None), text_probes(byte_tokenizer(), None))
    assert why is not None
    assert why.startswith("tokenizer_probe differs")
    assert "tokenizer.json" in why


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (make_template("{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"), "differs"),
        (None, "is missing"),
    ],
)
def test_templates_that_differ_in_a_space_or_are_missing_are_found(template: ChatTemplate | None, reason: str) -> None:
    probes = text_probes(byte_tokenizer(), template)
    assert find_text_mismatch(probes, probes) is None
    why = find_text_mismatch(probes, text_probes(byte_tokenizer(), PLAIN))
    assert why is not None
    assert why.startswith(f"template_probe {reason}")


def test_template_that_writes_the_date_has_the_same_probe_on_every_day() -> None:
    dated = make_template("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    assert (
        dated.render(
            Conversation.plain([("user", "x")]), rendered_unix_s=int(datetime(2026, 5, 4, tzinfo=UTC).timestamp())
        )
        == "04 May 2026x"
    )
    year = make_template("02 Jan 2026{{ messages[0].content }}")
    assert text_probes(byte_tokenizer(), dated).template == text_probes(byte_tokenizer(), year).template


def test_template_that_refuses_system_messages_is_probed_without() -> None:
    strict = make_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    lax = make_template("{{ messages[0].content }}")
    first, second = text_probes(byte_tokenizer(), strict), text_probes(byte_tokenizer(), lax)
    assert first.template not in (b"", second.template)
