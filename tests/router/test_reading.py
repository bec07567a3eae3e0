"""Large requests are read in child processes, with the same outcome as small ones."""

import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InvalidRequest, KvrelayError, Overloaded
from kvrelay.v1 import inference_pb2 as pb
from router.doors import arrivals
from router.doors.readers import Readers, Reading
from router.http import inquiries
from router.http.anthropic.calls import read_messages_body
from router.http.calls import Call
from router.http.embeddings import EmbeddingCall, read_embeddings
from router.http.generation import read_chat, read_completion
from router.http.responses.call import read_response
from router.tenants import ANYBODY

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = {"messages": [{"role": "user", "content": "é"}], "chat_template_kwargs": {"a": [1, {"b": None}]}, "stop": ["x"]}


def plain(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


READINGS: list[tuple[Reading[Any], bytes]] = [
    (Reading(read_completion, Call), plain(prompt=["a", "b"], n=2, logit_bias={"5": 1.5}, kvrelay={"timeout_s": 2.5})),
    (Reading(read_completion, Call), plain(prompt=[[1, 2], [3]], guided_json={"type": "string"}, stream=True)),
    (Reading(read_chat, Call), plain(**CHAT)),
    (Reading(read_messages_body, Call), plain(max_tokens=3, messages=CHAT["messages"], stop_sequences=["a"])),
    (Reading(read_response, Call), plain(input="a", metadata={"b": "c"}, text={"format": {"type": "json_object"}})),
    (Reading(read_embeddings, EmbeddingCall), plain(input=[[1], [2]], dimensions=4, encoding_format="base64")),
    (Reading(inquiries.read_tokenize, inquiries.TokenizeCall), plain(prompt="a", return_token_strs=True)),
    (Reading(inquiries.read_count_tokens, inquiries.TokenizeCall), plain(messages=CHAT["messages"])),
    (Reading(inquiries.read_detokenize, inquiries.DetokenizeCall), plain(tokens=[1, 2])),
    (Reading(arrivals.read_generate, pb.GenerateRequest), pb.GenerateRequest(text="a", priority=3).SerializeToString()),
    (Reading(arrivals.read_embed, pb.EmbedRequest), pb.EmbedRequest(text="a").SerializeToString()),
    (Reading(arrivals.read_tokenize, pb.TokenizeRequest), pb.TokenizeRequest(text="a").SerializeToString()),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def readers() -> AsyncIterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


@pytest.mark.parametrize(("reading", "raw"), READINGS, ids=lambda value: getattr(value, "name", ""))
async def test_a_child_reads_what_the_router_itself_would(readers: Readers, reading: Reading[Any], raw: bytes) -> None:
    here = await readers.read(replace(reading, inline_bytes=len(raw)), raw, tenant=ANYBODY)
    there = await readers.read(replace(reading, inline_bytes=0), raw, tenant=ANYBODY)
    assert type(there) is reading.kind
    assert there == here


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_refusal_names_the_field_wherever_the_request_is_read(readers: Readers, inline_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias") as caught:
        await readers.read(
            Reading(read_completion, Call, inline_bytes), plain(prompt="a", logit_bias={"x": 1}), tenant=ANYBODY
        )
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGPROF, InvalidRequest), (signal.SIGKILL, Overloaded)], ids=["too long", "killed"]
)
async def test_request_whose_child_ends_is_refused_and_the_next_is_read(
    readers: Readers, number: int, error: type[KvrelayError]
) -> None:
    with pytest.raises(error):
        await readers.read(Reading(_end_child, int, 0), b"%d" % number, tenant=ANYBODY)
    assert await readers.read(Reading(_length, int, 0), b"xyz", tenant=ANYBODY) == 3


def _end_child(raw: bytes) -> int:
    os.kill(os.getpid(), int(raw))
    raise AssertionError("it has ended")


def _length(raw: bytes) -> int:
    return len(raw)
