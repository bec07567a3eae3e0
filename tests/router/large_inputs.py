"""The largest inputs of every kind that clients may send, by door."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2

MAX_BYTES = 4 << 20
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE, EMBED, TOKENIZE = (f"/kvrelay.v1.InferenceService/{name}" for name in ("Generate", "Embed", "Tokenize"))
_TEXT = "a b c d 1 2 3 4 "

Input = tuple[str, Callable[[], bytes]]
"""A path or a method, and what makes the request."""


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"max_tokens": 1, **fields}).encode()


def _plain(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def _filled(head: bytes, entry: bytes, last: bytes, *, room: int = 64) -> Callable[[], bytes]:
    """Return what repeats an entry up to the largest body."""
    return lambda: head + entry * ((MAX_BYTES - len(head) - len(last) - room) // len(entry)) + last


def _filled_keys(head: bytes, value: bytes, last: bytes) -> Callable[[], bytes]:
    return lambda: head + b",".join(b'"%07x":%s' % (number, value) for number in range(250_000)) + last


def _turns(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"} | fields] * count


def _function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _texts(names: list[str], **more: Any) -> dict[str, Any]:
    """Return the schema of an object with these texts."""
    return {"type": "object", "properties": {name: {"type": "string", **more} for name in names}}


def _structured(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": _turns(1), "response_format": wanted}


_NAMES = [f"p{number}" for number in range(1_000)]
_CHATS: Mapping[str, dict[str, Any]] = {
    "text": {"messages": _turns(1, content=_TEXT * 200_000)},
    "messages": {"messages": _turns(4096, content=_TEXT * 30)},
    "empty parts": {"messages": _turns(110, content=[{"type": "text", "text": ""}] * 1024)},
    "calls": {"messages": _turns(900, role="assistant", tool_calls=[{"function": {"name": "f"}}] * 127)},
    "tools": {
        "messages": _turns(1),
        "tools": [
            _function(f"f{number}", description="d" * 1900, parameters=_texts(_NAMES[:500], enum=["a", "b"]))
            for number in range(128)
        ],
    },
    "required tools": {
        "messages": _turns(1),
        "tool_choice": "required",
        "tools": [_function(f"f{number}", parameters=_texts(_NAMES[:20])) for number in range(100)],
    },
    "variables": {"messages": _turns(1), "chat_template_kwargs": {str(k): [[]] * 20_000 for k in range(50)}},
    "schema": _structured({"enum": [f"value {k}" for k in range(200_000)]}),
    "properties": _structured(_texts(_NAMES)),
    "alternatives": _structured({"oneOf": [_texts([name]) | {"required": [name]} for name in _NAMES[:700]]}),
}

HTTP: Mapping[str, Input] = {
    "text": (COMPLETIONS, _json(prompt=_TEXT * 250_000)),
    "text that fits": (COMPLETIONS, _json(prompt=_TEXT * 3_000)),
    "texts": (COMPLETIONS, _json(prompt=[_TEXT * 1_800] * 128)),
    "texts that fit": (COMPLETIONS, _json(prompt=[_TEXT * 60] * 128)),
    "escapes": (COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":"', b"\\u0061", b'"}')),
    "ids": (COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":[', b"1,", b"1]}")),
    "ids that fit": (COMPLETIONS, _json(prompt=list(itertools.islice(itertools.cycle(range(1, 250)), 50_000)))),
    "ids, the last wrong": (COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":[', b"1,", b"-1]}")),
    "lists of ids": (COMPLETIONS, _json(prompt=[[1] * 10_000] * 128)),
    "lists of ids that fit": (COMPLETIONS, _json(prompt=[[1] * 1_000] * 128)),
    "biases": (COMPLETIONS, _json(prompt="a", logit_bias={str(k): 1 for k in range(200_000)})),
    "stops": (COMPLETIONS, _json(prompt="a", stop=["ab"] * 500_000)),
    "unknown value": (COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":"a","x":[', b"[],", b"1]}")),
    "unknown keys": (COMPLETIONS, _filled_keys(b'{"max_tokens":1,"prompt":"a",', b"null", b"}")),
    "same key": (COMPLETIONS, _filled(b'{"max_tokens":1,"prompt":"a"', b',"x":[]', b"}")),
    "nested": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}"),
    "regex": (COMPLETIONS, _json(prompt="a", guided_regex="(a|b){1,900}" * 200_000)),
    "grammar": (COMPLETIONS, _json(prompt="a", guided_grammar="start: " + '"a" ' * 500_000)),
    "choices": (COMPLETIONS, _json(prompt="a", guided_choice=[f"c{k}" for k in range(300_000)])),
    "metadata": (RESPONSES, _plain(input="a", metadata={str(k): "v" for k in range(300_000)})),
    **{f"chat: {name}": (CHAT, _json(**fields)) for name, fields in _CHATS.items()},
    "responses: text": (RESPONSES, _plain(input=_TEXT * 250_000)),
    "responses: items": (RESPONSES, _plain(input=[{"role": "user", "content": "x"}] * 100_000)),
    "responses: parts": (
        RESPONSES,
        _plain(input=[{"role": "user", "content": [{"type": "input_text", "text": ""}] * 1024}] * 95),
    ),
    "responses: calls": (
        RESPONSES,
        _plain(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 4096),
    ),
    "messages: text": (MESSAGES, _json(messages=_turns(1, content=_TEXT * 250_000))),
    "messages: turns": (MESSAGES, _json(messages=_turns(4096, content=_TEXT * 50))),
    "messages: blocks": (MESSAGES, _json(messages=_turns(120, content=[{"type": "text", "text": ""}] * 1024))),
    "messages: uses": (
        MESSAGES,
        _json(
            messages=_turns(
                700,
                role="assistant",
                content=[{"type": "tool_use", "id": "u", "name": "f", "input": {}}] * 100,
            )
        ),
    ),
    "count_tokens": ("/v1/messages/count_tokens", _plain(messages=_turns(4000, content=_TEXT * 60))),
    "embeddings that fit": ("/v1/embeddings", _plain(input=[_TEXT * 60] * 128)),
    "tokenize": ("/tokenize", _plain(prompt=_TEXT * 250_000)),
    "tokenize: pieces": ("/tokenize", _plain(prompt="1" * 4_000_000, return_token_strs=True)),
    "tokenize: chat": ("/tokenize", _plain(messages=_turns(4096, content=_TEXT * 50))),
    "detokenize": ("/detokenize", _filled(b'{"tokens":[', b"1,", b"1]}")),
    "detokenize that fits": ("/detokenize", _plain(tokens=[97] * 131_000)),
}


def _generate(**fields: Any) -> Callable[[], bytes]:
    return lambda: pb.GenerateRequest(**fields).SerializeToString()


def _empty(tag: bytes, *, inside: bytes) -> Callable[[], bytes]:
    """Return what makes a message with nothing but empty submessages, inside a submessage with that tag."""

    def make() -> bytes:
        many = tag + b"\0"
        body = many * ((MAX_BYTES - 16) // 2)
        return inside + _varint(len(body)) + body

    return make


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _call_chat() -> pb.ChatPrompt:
    calls = [pb.ToolCall(name="f")] * 128
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="assistant", tool_calls=calls)] * 4096)


_ONE = sampling_pb2.SamplingParams(max_tokens=1)
GRPC: Mapping[str, Input] = {
    "gRPC: text": (GENERATE, _generate(text=_TEXT * 250_000, sampling=_ONE)),
    "gRPC: ids": (GENERATE, lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 4_000_000)).SerializeToString()),
    "gRPC: ids that fit": (
        GENERATE,
        lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 50_000), sampling=_ONE).SerializeToString(),
    ),
    "gRPC: messages": (
        GENERATE,
        lambda: pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=_TEXT * 50)] * 4096)
        ).SerializeToString(),
    ),
    "gRPC: calls": (GENERATE, lambda: pb.GenerateRequest(chat=_call_chat()).SerializeToString()),
    "gRPC: tokenize calls": (TOKENIZE, lambda: pb.TokenizeRequest(chat=_call_chat()).SerializeToString()),
    "gRPC: variables": (
        GENERATE,
        lambda: pb.GenerateRequest(
            chat=pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user")],
                template_variables=json.dumps({str(k): [[]] * 20_000 for k in range(50)}),
            )
        ).SerializeToString(),
    ),
    "gRPC: empty messages": (GENERATE, _empty(b"\x0a", inside=b"\x1a")),
    "gRPC: empty samples": (GENERATE, _empty(b"\x0a", inside=b"\x52")),
    "gRPC: empty biases": (GENERATE, _empty(b"\x42", inside=b"\x22")),
    "gRPC: empty stops": (GENERATE, _empty(b"\x5a", inside=b"\x22")),
    "gRPC: unknown fields": (GENERATE, lambda: b"\xf8\x7f\x01" * 1_390_000),
    "gRPC: unknown groups": (GENERATE, lambda: b"\xfb\x7f\xfc\x7f" * 1_000_000),
    "gRPC: structures": (
        GENERATE,
        lambda: pb.GenerateRequest(
            text="a",
            sampling=sampling_pb2.SamplingParams(
                structured_outputs=json.dumps({"json": {"enum": [f"v{k}" for k in range(300_000)]}})
            ),
        ).SerializeToString(),
    ),
    "gRPC: resume": (
        GENERATE,
        lambda: pb.GenerateRequest(
            text="a",
            sampling=sampling_pb2.SamplingParams(n=64, max_tokens=2000, seed=1, temperature=1.0),
            resume=pb.Resume(samples=[pb.ResumedSample(tokens=b"\x61\0\0\0" * 1_900, text="a" * 1_900)] * 64),
        ).SerializeToString(),
    ),
    "gRPC: embed": (EMBED, lambda: pb.EmbedRequest(text=_TEXT * 250_000).SerializeToString()),
    "gRPC: tokenize": (TOKENIZE, lambda: pb.TokenizeRequest(text=_TEXT * 250_000).SerializeToString()),
    "gRPC: label": (GENERATE, _generate(text="a", label="m" * 4_000_000, sampling=_ONE)),
}

ANSWERS: Mapping[str, Input] = {
    "answers": (COMPLETIONS, _plain(prompt="a", max_tokens=300, n=64, ignore_eos=True)),
    "answers with log-probabilities": (
        COMPLETIONS,
        _plain(prompt="a", max_tokens=100, n=64, logprobs=20, ignore_eos=True),
    ),
    "streams with log-probabilities": (
        COMPLETIONS,
        _plain(prompt="a", max_tokens=100, n=64, logprobs=20, ignore_eos=True, stream=True),
    ),
    "chats with log-probabilities": (
        CHAT,
        _plain(messages=_turns(1), max_tokens=100, n=64, logprobs=True, top_logprobs=20, ignore_eos=True),
    ),
    "echo": (COMPLETIONS, _plain(prompt=_TEXT * 800, max_tokens=1, echo=True, logprobs=20)),
    "echo, streamed": (COMPLETIONS, _plain(prompt=_TEXT * 800, max_tokens=1, echo=True, logprobs=20, stream=True)),
    "prompts' log-probabilities": (COMPLETIONS, _plain(prompt=_TEXT * 800, max_tokens=1, prompt_logprobs=20)),
    "a chat's log-probabilities of the prompt": (
        CHAT,
        _plain(messages=[{"role": "user", "content": _TEXT * 800}], max_tokens=1, prompt_logprobs=20),
    ),
    "prompt ids": (COMPLETIONS, _plain(prompt=_TEXT * 4_000, max_tokens=1, return_token_ids=True)),
    "prompt ids, streamed": (
        COMPLETIONS,
        _plain(prompt=_TEXT * 4_000, max_tokens=1, return_token_ids=True, stream=True),
    ),
    "prompts' ids": (COMPLETIONS, _plain(prompt=[_TEXT * 500] * 64, max_tokens=1, return_token_ids=True)),
}
