"""The OpenAI target against scripted servers: probes, requests, counts and errors."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    Unauthenticated,
    Unreachable,
)
from kvrelay.client.chat import ChatMessage
from kvrelay.client.events import Forecast
from measure.load.records import ServerReport
from measure.load.sending import settled
from measure.load.targets.completion import CompletionReader, SseReader
from measure.load.targets.interface import Feature, Target, TargetAnswer, TargetRequest, TargetSpec, make_target
from tests.measure.load.sse_server import ScriptedServer, serving

ALL = (Feature.IGNORE_EOS, Feature.MIN_TOKENS, Feature.TOKEN_IDS)


def request(
    prompt: str | Sequence[int] | Sequence[ChatMessage] = (1, 2, 3), *, num_output_tokens: int = 4, **fields: Any
) -> TargetRequest:
    values: dict[str, Any] = {"seed": 5, "timeout_s": 60.0, **fields}
    return TargetRequest(prompt=prompt, num_prompt_tokens=3, num_output_tokens=num_output_tokens, **values)


@asynccontextmanager
async def target_of(server: ScriptedServer, **spec: Any) -> AsyncIterator[Target]:
    """Serve, and yield an unconnected target."""
    async with serving(server):
        target = make_target(TargetSpec(url=server.url, **spec))
        try:
            yield target
        finally:
            await target.aclose()


async def ask(server: ScriptedServer, asked: TargetRequest, **spec: Any) -> tuple[TargetAnswer, int]:
    """Return an answer, and the number of tokens that its pieces brought."""
    counts: list[int] = []
    async with target_of(server, model="m", **{"features": ALL} | spec) as target:
        return await target.prepare(asked)(counts.append), sum(counts)


@pytest.mark.parametrize(
    ("server", "features"),
    [
        (ScriptedServer(), ALL),
        (ScriptedServer(tells_ids=False), ALL[:2]),
        (ScriptedServer(known=frozenset({"ignore_eos", "min_tokens"})), ALL[:2]),
        (ScriptedServer(known=frozenset()), ()),
        (ScriptedServer(completes_text=False), ALL),
        (ScriptedServer(owned_by="kvrelay"), (*ALL, Feature.REPORT)),
    ],
)
async def test_describe_finds_the_servers_extensions_and_notes_missing_ones(
    server: ScriptedServer, features: tuple[Feature, ...]
) -> None:
    async with target_of(server) as target:
        info = await target.describe()
    assert target.spec.features == features
    assert target.spec.model == info.model == "m"
    assert (info.system, info.max_model_len) == (f"{server.owned_by} 9.9", 512)
    assert len(info.notes) == (Feature.IGNORE_EOS not in features)


async def test_token_prompt_asks_for_an_exact_length_and_ids_only_where_needed() -> None:
    server = ScriptedServer()
    answer, num_tokens = await ask(server, request(wants_token_ids=True), api_key="secret")
    body = server.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (4, 4, True, 0)
    assert body["stream_options"] == {"include_usage": True}
    assert server.authorizations == ["Bearer secret"]
    assert answer.token_ids == (100, 101, 102, 103)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, num_tokens) == (7, 4, 4)
    assert answer.report.num_cached_tokens == 3

    answer, _ = await ask(server, request())
    assert "return_token_ids" not in server.bodies[1]
    assert answer.token_ids is None
    assert answer.text == "t0 t1 t2 t3 "


async def test_chat_goes_to_its_own_endpoint_and_a_bare_role_is_no_token() -> None:
    server = ScriptedServer()
    answer, num_tokens = await ask(server, request((ChatMessage(role="user", content="hi"),)))
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (answer.text, num_tokens) == ("t0 t1 t2 t3 ", 4)


@pytest.mark.parametrize("prompt", ["text", (ChatMessage(role="user", content="hi"),)])
async def test_last_event_with_only_a_reason_is_no_token(prompt: Any) -> None:
    _answer, num_tokens = await ask(ScriptedServer(tells_reason_apart=True), request(prompt))
    assert num_tokens == 4


@pytest.mark.parametrize(
    ("deltas", "total", "expected"),
    [
        ([{"content": ""}, {"content": ""}, {"content": "a"}, {"content": "b"}], 2, (0, 0, 1, 1)),
        ([{}, {"content": "a"}, {"content": ""}, {"content": "b"}], 3, (0, 1, 1, 1)),  # half a character
        ([{"content": ""}, {"content": "é"}], 2, (1, 1)),  # the first token is half of it
        ([{"content": None}, {"reasoning_content": "a"}, {}], 2, (0, 1, 1)),  # the last token has no text
        ([{"content": ""}, {"content": "a b"}, {"content": "c d"}], 4, (0, 2, 2)),
        ([{"content": ""}, {"content": "a"}], None, (0, 1)),
    ],
)
def test_event_without_text_is_a_token_only_if_the_total_counts_it(
    deltas: list[dict[str, Any]], total: int | None, expected: tuple[int, ...]
) -> None:
    reader = CompletionReader()
    assert reader.take(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}') is None
    counts = [reader.take(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()) for delta in deltas]
    assert reader.take(json.dumps({"choices": [], "usage": {"completion_tokens": total}}).encode()) is None
    reader.take(b"[DONE]")
    assert settled([count for count in counts if count is not None], reader.build().num_output_tokens) == expected


async def test_report_of_our_own_server_is_requested_and_read() -> None:
    predicted = {"predicted_ttft_s": 0.5, "predicted_cached_tokens": 16, "line_ttft_forecast": None}
    forecast = {"expected_s": 0.75, "low_s": 0.5, "high_s": None}
    timings = {"queue_s": 0.1, "prefill_s": 0.2, "transfer_s": 0.3, "transfer_exposed_s": 0.05, "ttft_s": 0.4}
    timings["e2e_s"] = 0.9
    told = {
        "request_id": "req-9",
        "plans": [{"prefill_worker_id": "p0", "decode_worker_id": "d0", **predicted, "ttft_forecast": forecast}],
        "usage": {"num_cached_tokens": 16, "num_pulled_tokens": 0, "num_decode_cached_tokens": 8},
        "timings": timings,
        "transfer": {"kv_bytes": 1024, "transport": "shm"},
        "num_attempts": 1,
    }
    server = ScriptedServer(report={"requests": [told]})
    answer, _ = await ask(server, request(ttft_slo_s=1.5), features=(*ALL, Feature.REPORT))
    assert server.bodies[0]["kvrelay"] == {"report": True, "timeout_s": 60.0, "ttft_s": 1.5}
    assert answer.report == ServerReport(
        request_id="req-9",
        prefill_worker="p0",
        decode_worker="d0",
        num_attempts=1,
        num_cached_tokens=16,
        num_pulled_tokens=0,
        num_decode_cached_tokens=8,
        transfer_bytes=1024,
        transport="shm",
        ttft_forecast=Forecast(expected_s=0.75, low_s=0.5),
        **timings,  # type: ignore[arg-type]
        **predicted,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("status", "body", "expected", "message"),
    [
        (429, {"error": {"message": "full"}}, Overloaded, "full"),
        (503, "starting", Overloaded, "starting"),
        (400, {"error": {"message": "bad", "param": "prompt"}}, InvalidRequest, "bad"),
        (422, {"detail": [{"loc": ["body"]}]}, InvalidRequest, "[{'loc': ['body']}]"),
        (401, {"error": "who?"}, Unauthenticated, "who?"),
        (504, {}, DeadlineExceeded, "{}"),
        (500, {"message": "oops"}, EngineFault, "oops"),
    ],
)
async def test_refusal_becomes_the_error_of_its_status(
    status: int, body: Any, expected: type[KvrelayError], message: str
) -> None:
    with pytest.raises(expected) as caught:
        await ask(ScriptedServer(refuse_with=(status, body)), request())
    assert (type(caught.value), caught.value.message) == (expected, f"HTTP {status}: {message}")


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (ScriptedServer(break_after=2), Unreachable),
        (ScriptedServer(error_after=2), EngineFault),
    ],
)
async def test_answer_that_breaks_off_is_an_error(server: ScriptedServer, expected: type[KvrelayError]) -> None:
    with pytest.raises(expected):
        await ask(server, request())


async def test_closed_port_is_unreachable() -> None:
    async with serving(ScriptedServer()) as server:
        pass
    target = make_target(TargetSpec(url=server.url, model="m"))
    with pytest.raises(Unreachable):
        await target.prepare(request())(lambda _num: None)
    with pytest.raises(Unreachable):
        await target.describe()
    await target.aclose()


async def test_slow_answer_times_out_and_the_server_sees_the_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer(hold=asyncio.Event())

    @asynccontextmanager
    async def timeout_of_an_answer(limit_s: float) -> AsyncIterator[None]:
        """Time that begins when the answer does: on a busy machine a request takes longer to arrive."""
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:

            async def begin() -> None:
                await server.began.wait()
                limit.reschedule(asyncio.get_running_loop().time() + limit_s)

            tasks.create_task(begin())
            yield

    async with target_of(server, model="m") as target, asyncio.timeout(60):
        monkeypatch.setattr("measure.load.targets.openai.asyncio", SimpleNamespace(timeout=timeout_of_an_answer))
        with pytest.raises(DeadlineExceeded):
            await target.prepare(request(timeout_s=0.05))(lambda _num: None)
        await server.client_left.wait()


async def test_cancelled_call_disconnects_at_once() -> None:
    server = ScriptedServer(hold=asyncio.Event())
    async with target_of(server, model="m") as target, asyncio.timeout(60):
        began = asyncio.Event()
        call = asyncio.ensure_future(target.prepare(request())(lambda _num: began.set()))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.client_left.wait()


VLLM_METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001"} 0.0
"""


async def test_sample_reads_the_engines_of_vllm() -> None:
    async with target_of(ScriptedServer(metrics=VLLM_METRICS)) as target:
        sample = await target.sample(1.5)
    assert sample is not None and sample.at_s == 1.5
    first, second = sample.workers
    assert (first.worker_id, first.num_running, first.num_waiting) == ("engine-0", 3, 2)
    assert (first.num_blocks, first.num_used_blocks) == (400, 100)
    assert (first.num_computed_tokens, first.num_cached_tokens) == (400, 600)
    assert (second.worker_id, second.num_running, second.num_blocks) == ("engine-1", 1, 0)


@pytest.mark.parametrize("metrics", [None, "# nothing that is known\nup 1\n"])
async def test_sample_is_none_when_the_server_reports_nothing(metrics: str | None) -> None:
    async with target_of(ScriptedServer(metrics=metrics)) as target:
        assert await target.sample(0.0) is None


async def test_sample_of_our_router_has_its_queue() -> None:
    async with target_of(ScriptedServer(metrics="kvrelay_requests_queued 4.0\n")) as target:
        sample = await target.sample(0.0)
    assert sample is not None and (sample.num_queued, sample.workers) == (4, ())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/v1", "localhost", "host:99999", "grpc://host", "ftp://host:1", "http:///v1", ":80"]
)
def test_make_target_refuses_bad_addresses(url: str) -> None:
    with pytest.raises(InvalidRequest, match="target"):
        make_target(TargetSpec(url=url))


@given(
    events=st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b""))),
    crlf=st.booleans(),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
def test_sse_events_are_the_same_wherever_the_bytes_are_cut(events: list[bytes], crlf: bool, cuts: list[int]) -> None:
    end = b"\r\n" if crlf else b"\n"
    stream = b"".join(b": comment" + end + b"data: " + event + end + end for event in events)
    reader, edges = SseReader(), [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [data for begin, stop in itertools.pairwise(edges) for data in reader.feed(stream[begin:stop])]
    assert found == events
