"""router.reading.tokenizer against transformers, hostile conversations and folders of models that cannot be used."""

import functools
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

from common.chat_template import ChatTemplate, Conversation
from common.errors import InvalidRequest
from common.ids import RequestId
from common.model_files import ModelNotFound, default_model_dir
from common.tokens import as_tokens
from kvrelay.v1 import inference_pb2 as pb
from router.reading.tokenizer import TextCodec
from router.reading.validation import RequestReader
from router.tenants import ANYBODY
from tests.router.fake_worker import MODEL

NOW_UNIX_S = 1_800_000_000
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\ttab ",
    "naïve café 東京都 😀👩‍👩‍👧",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "</s><s>",
    "\x00\x07\u200b\ufeff",
    "word " * 500,
]
CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye <b>")],
    [("user", " \n leading and trailing \n ")],
    [("user", "")],
    [("user", "{{ messages }} {% raw %} 東京 😀")],
]
# Uses all that templates may count on: whitespace control, loop controls, filters, namespaces, the training mark.
TEMPLATE = """\
{{- bos_token }}
{%- set seen = namespace(system=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set seen.system = true %}
        {%- continue %}
    {%- endif %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == (1 if seen.system else 0)) %}
        {{- raise_exception('roles must alternate, not ' + message.role) }}
    {%- endif %}
    {% if message.role == 'assistant' %}
    {%- generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {% else %}
[{{ message.role | upper }}] {{ {'text': message.content, 'n': [1, 2.5, none]} | tojson }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}[ANSWER]{% endif %}
{%- if tools is none and not documents %} (no tools){% endif %}
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it, with a small tokenizer that adds special tokens around plain text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    folder = tmp_path_factory.mktemp("model")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["small", pytest.param("default", marks=pytest.mark.model)])
def any_model_dir(request: pytest.FixtureRequest, model_dir: Path) -> Path:
    if request.param == "small":
        return model_dir
    if not (default_model_dir() / "tokenizer.json").is_file():
        pytest.skip("the default model has not been fetched")
    return default_model_dir()


@pytest.fixture
def codec(model_dir: Path) -> TextCodec:
    return TextCodec.load(model_dir)


@pytest.fixture(scope="module")
def any_codec(any_model_dir: Path) -> TextCodec:
    return TextCodec.load(any_model_dir)


@functools.cache
def reference(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_encode_of_any_text_equals_transformers(any_codec: TextCodec, any_model_dir: Path) -> None:
    for text in TEXTS:
        assert any_codec.encode_now(text) == as_tokens(reference(any_model_dir)(text)["input_ids"])


def test_encode_chat_of_any_conversation_equals_transformers(any_codec: TextCodec, any_model_dir: Path) -> None:
    expected = reference(any_model_dir)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        token_ids = expected.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert (any_codec.encode_chat_now(Conversation.plain(chat), rendered_unix_s=NOW_UNIX_S)).token_ids == as_tokens(
            token_ids
        )


def test_vocab_size_equals_transformers(any_codec: TextCodec, any_model_dir: Path) -> None:
    assert any_codec.vocab_size == len(reference(any_model_dir))


class ThreadRecorder:
    """Stands in for a tokenizer; tells which threads encode."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.threads.append(threading.get_ident())
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="b")])


@pytest.mark.parametrize("prompt", [{"text": "a"}, {"chat": CHAT}], ids=["text", "chat"])
async def test_prompts_are_tokenized_off_the_event_loops_thread(codec: TextCodec, prompt: dict[str, Any]) -> None:
    recorder: Any = ThreadRecorder(codec.tokenizer)
    reader = RequestReader(TextCodec(recorder, ChatTemplate(TEMPLATE, special_tokens={})), default_max_tokens=1)
    model = replace(MODEL, vocab_size=codec.vocab_size)
    await reader.read(pb.GenerateRequest(**prompt), request_id=RequestId("r"), model=model, tenant=ANYBODY)
    reader.close()
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads


def test_decode_pieces_show_each_tokens_own_text_with_its_space(codec: TextCodec) -> None:
    token_ids = [codec.tokenizer.token_to_id(token) for token in ("<s>", "▁word", "▁", "<0x41>", "<0xE4>")]
    assert codec.decode_pieces([each for each in token_ids if each is not None]) == ("<s>", " word", " ", "A", "�")


def test_decode_pieces_of_an_id_outside_the_vocabulary_is_empty(codec: TextCodec) -> None:
    assert codec.decode_pieces([10**6]) == ("",)


def test_decode_is_the_inverse_of_encode(any_codec: TextCodec) -> None:
    for text in ("Hello, world", "na\u00efve \u6771\u4eac \U0001f600", ""):
        assert text in any_codec.decode((any_codec.encode_now(text)).tolist())  # special tokens may surround it


def test_decode_pieces_of_ascii_text_join_to_the_decoded_text(any_codec: TextCodec) -> None:
    for text in TEXTS:
        ascii_text = text.encode("ascii", "ignore").decode()
        token_ids = any_codec.tokenizer.encode(ascii_text, add_special_tokens=False).ids
        whole = any_codec.tokenizer.decode(token_ids, skip_special_tokens=False)
        joined = "".join(any_codec.decode_pieces(token_ids))
        assert joined in (whole, f" {whole}")  # a decoder may strip the space that the tokenizer put in front


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ([("critic", "x")], "chat.messages[0].role"),
        ([("user", "x"), ("", "y")], "chat.messages[1].role"),
        ([("\ud800", "x")], "chat.messages[0].role"),
        ([("user", "x"), ("assistant", "y\udfff")], "chat.messages[1].content"),
        ([("assistant", "x")], "chat.messages"),
        ([("user", "x"), ("user", "y")], "chat.messages"),
    ],
)
def test_encode_chat_of_a_bad_conversation_raises_invalid_request_naming_the_field(
    codec: TextCodec, messages: list[tuple[str, str]], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        codec.encode_chat_now(Conversation.plain(messages), rendered_unix_s=NOW_UNIX_S)
    assert raised.value.field == field


def test_encode_of_a_lone_surrogate_raises_invalid_request(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match="character 2 ") as raised:
        codec.encode_now("ab\ud83d")
    assert raised.value.field == "text"


def write_model(folder: Path, model_dir: Path, **config: Any) -> Path:
    (folder / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "chat_template",
    ["{{ eos_token }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]],
    ids=["string", "list"],
)
@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}], ids=["string", "object"])
def test_load_finds_template_and_special_tokens_in_the_tokenizer_config(
    tmp_path: Path, model_dir: Path, chat_template: Any, eos: Any
) -> None:
    codec = TextCodec.load(write_model(tmp_path, model_dir, chat_template=chat_template, eos_token=eos))
    assert codec.template_source
    assert (
        codec.encode_chat_now(Conversation.plain([("user", "x")]), rendered_unix_s=NOW_UNIX_S)
    ).token_ids.tolist() == [codec.tokenizer.token_to_id("</s>")]


def test_load_prefers_the_template_file_and_reads_the_special_tokens_map(tmp_path: Path, model_dir: Path) -> None:
    write_model(tmp_path, model_dir, chat_template="{{ bos_token }}")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    codec = TextCodec.load(tmp_path)
    assert (
        codec.encode_chat_now(Conversation.plain([("user", "x")]), rendered_unix_s=NOW_UNIX_S)
    ).token_ids.tolist() == [codec.tokenizer.token_to_id("</s>")]


def test_encode_chat_without_a_template_raises_invalid_request(tmp_path: Path, model_dir: Path) -> None:
    codec = TextCodec.load(write_model(tmp_path, model_dir))
    assert codec.template_source is None
    with pytest.raises(InvalidRequest, match="no chat template") as raised:
        codec.encode_chat_now(Conversation.plain([("user", "x")]), rendered_unix_s=NOW_UNIX_S)
    assert raised.value.field == "chat"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"chat_template": "{% for x in %}"}, "does not compile"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "none is named default"),
        ({"chat_template": 7}, "neither a string nor a list"),
    ],
)
def test_load_of_an_unusable_template_raises_model_not_found(
    tmp_path: Path, model_dir: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelNotFound, match=reason):
        TextCodec.load(write_model(tmp_path, model_dir, **config))


def test_load_without_tokenizer_json_raises_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=re.escape(str(tmp_path))):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_load_of_a_broken_config_raises_model_not_found(tmp_path: Path, model_dir: Path, content: str) -> None:
    write_model(tmp_path, model_dir)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=r"tokenizer_config\.json"):
        TextCodec.load(tmp_path)
