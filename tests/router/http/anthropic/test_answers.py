"""Events and documents of an answer with thoughts, text and a call, without a cluster."""

import json
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from common.sampling import SamplingParams
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.sampling_pb2 import FINISH_REASON_STOP, SampleToken
from router.http.anthropic.answers import GatheredMessage, StreamedMessage
from router.http.anthropic.calls import read_messages_body
from router.http.anthropic.stops import StopFinder, matched_stop
from router.http.exchange import Exchange
from router.http.pieces import RequestFacts
from router.record.record import Job

ANSWER = '<think>hm</think>\n\nI look.<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
CONTENT: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "f", "input": {"a": "é"}},
]


class Recorder:
    """Stands for an exchange: keeps what is sent."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.document: Any = None

    async def write(self, events: bytes) -> None:
        self.written.append(events)

    def finish(self, last: Iterable[str]) -> None:
        self.written.append("".join(last).encode())

    def finish_json(self, value: Any) -> None:
        self.document = value

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = b"".join(self.written).decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def answered(*, stream: bool, num_chars: int, stops: Sequence[str] = ()) -> Recorder:
    """Answer, with so many characters in each message from the worker."""
    recorder = Recorder()
    call = read_messages_body(
        json.dumps({"max_tokens": 9, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
    )

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    kind = StreamedMessage if stream else GatheredMessage
    answer = kind(call, cast(Exchange, recorder), decode=decode, answer_id=RequestId("req-1"))
    sampling = SamplingParams(stop=tuple(stops))
    job = make_job(sampling)
    counts = pb.Usage(num_prompt_tokens=9, num_cached_tokens=4)
    facts = answer.facts[0] = RequestFacts("req-1", begun=counts)
    answer.open(0, job, None)
    tokens = [SampleToken(token_id=ord(letter), text=letter) for letter in ANSWER]
    tokens.append(SampleToken(token_id=0, finish_reason=FINISH_REASON_STOP))
    for start in range(0, len(tokens), num_chars):
        await answer.take(0, pb.TokenDelta(tokens=tokens[start : start + num_chars]))
    facts.completed = pb.Completed(usage=pb.Usage(num_prompt_tokens=9, num_output_tokens=70, num_cached_tokens=4))
    answer.finish()
    return recorder


def make_job(sampling: SamplingParams) -> Job:
    """Return a job of a model that thinks and calls, as far as an answer reads it."""
    job = SimpleNamespace(
        model=SimpleNamespace(name="fake"),
        request_id="req-1",
        prompt_token_ids=[0] * 9,
        sampling=sampling,
        answer_format=pb.AnswerFormat(tools="hermes", reasoning="qwen3"),
    )
    return cast(Job, job)


@pytest.mark.parametrize("num_chars", [1, 7, 1000])
async def test_document_has_thoughts_text_and_the_call(num_chars: int) -> None:
    document = (await answered(stream=False, num_chars=num_chars)).document
    call_id = document["content"][-1].pop("id")
    assert len(call_id) == 9
    assert document == {
        "id": "msg_req-1",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": CONTENT,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "output_tokens": 70,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        },
    }


@pytest.mark.parametrize("num_chars", [1, 7, 1000])
async def test_events_begin_and_end_every_block_in_order(num_chars: int) -> None:
    events = (await answered(stream=True, num_chars=num_chars)).events
    steps = [(event["type"], event.get("index")) for event in events if event["type"] != "content_block_delta"]
    assert steps == [
        ("message_start", None),
        *((f"content_block_{step}", index) for index in range(3) for step in ("start", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    found = {kind: "".join(delta.get(kind, "") for delta in deltas) for kind in ("thinking", "text", "partial_json")}
    assert found == {"thinking": "hm", "text": "I look.", "partial_json": '{"a": "é"}'}
    assert [delta for delta in deltas if delta["type"] == "signature_delta"] == [
        {"type": "signature_delta", "signature": "unsigned"}
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_tokens_that_come_together_are_one_delta_of_each_block() -> None:
    recorder = await answered(stream=True, num_chars=1000)
    kinds = [event["delta"]["type"] for event in recorder.events if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert len(recorder.written) == 2, "one write for the tokens, one for the end"


@pytest.mark.parametrize(
    ("stops", "text", "decoded", "found"),
    [
        (["stop"], "I will ", "I will stop", "stop"),
        (["stop"], "I will ", "I will stopping", "stop"),
        (["stop"], "I will ", "I will <|im_end|>", None),
        (["|>"], "I will ", "I will <|im_end|>", None),
        (["no", "stop"], "no", "no stop", None),
        (["op", "stop"], "I ", "I stop", "stop"),
        (["b", "bc"], "a", "abc", "b"),
        (["bc", "abc"], "", "abc", "abc"),
        (["a"], "", "a", "a"),
        ([], "a", "ab", None),
        (["x"], "a\N{REPLACEMENT CHARACTER}", "é", None),
    ],
)
def test_stop_is_what_follows_the_text(stops: Sequence[str], text: str, decoded: str, found: str | None) -> None:
    assert matched_stop(stops, text=text, decoded=decoded) == found


@given(st.text("ab", max_size=80), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_finder_agrees_with_a_stream_of_single_characters(answer: str, stops: list[str]) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    finder, expected = StopFinder(stops, decode), None
    ends = {end for stop in stops for end in range(len(answer) + 1) if answer[:end].endswith(stop)}
    if ends:
        answer = answer[: min(ends)]
        expected = max((stop for stop in stops if answer.endswith(stop)), key=len)
    text = answer.removesuffix(expected or "")
    for position, letter in enumerate(answer):
        finder.push(SampleToken(token_id=ord(letter), text=text[position : position + 1]))
    assert (finder.find() if expected else None) == expected
