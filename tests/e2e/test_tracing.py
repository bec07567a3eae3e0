"""One request makes one connected trace across router and workers, and no trace shows what was said."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from common.clock import SystemClock
from common.config import TracingConfig
from common.otlp import SdkTracer
from kvrelay.client import Generation, PlanChosen, Token
from tests.e2e.in_process import System, running_system
from tests.e2e.test_drain import drained

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

PROMPT = "the lighthouse keeper counts the ships that pass by night. " * 4
SHAPE: dict[str, Any] = {"num_blocks": 2048, "step_s": 0.002, "max_step_tokens": 64}
REMOTE = {"policy": "longest_prefix", "local_prefill_max_tokens": 0}


@dataclass
class Traced:
    """The exported spans of a system."""

    exporter: InMemorySpanExporter

    async def spans(self, num_roots: int = 1) -> list[ReadableSpan]:
        """Return all spans once so many requests, and the workers' calls for them, have ended."""
        async with asyncio.timeout(60):
            while True:
                spans = list(self.exporter.get_finished_spans())
                ids = {span.context.span_id for span in spans}
                orphans = [span for span in spans if span.parent is not None and span.parent.span_id not in ids]
                roots = [span for span in spans if span.parent is None]
                if len(roots) == num_roots and not orphans:
                    return spans
                await asyncio.sleep(0.005)


def trace(system: System, config: TracingConfig | None = None) -> Traced:
    """Let every process of a system export its spans to one place."""
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)

    def tracer(service: str, instance: str) -> SdkTracer:
        return SdkTracer(processor, SystemClock(), service=service, instance=instance)

    traces = system.router.door.parts.orchestrator.traces
    traces.record_to(tracer("kvrelay-router", "router-0"), config or TracingConfig(sample_rate=1.0))
    for name, worker in system.workers.items():
        worker.runtime.tracer = tracer("kvrelay-worker", name)
    return Traced(exporter)


def below(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[ReadableSpan]:
    """Return the children of a span, in the order of their beginnings."""
    found = [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]
    return sorted(found, key=lambda span: span.start_time or 0)


def names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def instance(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.instance.id"])


async def answer_with_a_loss(system: System) -> Generation:
    """Return an answer whose decode worker dies in the middle."""
    system.pace.slow_down(at=30)
    async with system.client() as client, client.stream(PROMPT, max_tokens=200, ignore_eos=True, seed=1) as events:
        async for event in events:
            if isinstance(event, PlanChosen):
                decode = event.decode_worker_id
            if isinstance(event, Token) and event.token_index == 10:
                await system.kill(decode)
                system.pace.hurry()
        return await events.result()


async def test_request_that_lost_its_decode_worker_is_one_connected_trace() -> None:
    async with running_system(num_decode=2, router=REMOTE, **SHAPE) as system:
        traced = trace(system)
        answer = await answer_with_a_loss(system)
        spans = await traced.spans()

    (root,) = [span for span in spans if span.parent is None]
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    assert (root.kind, instance(root)) == (SpanKind.SERVER, "router-0")
    assert names(below(spans, root)) == ["door", "tokenize", "line", "choice", "attempt", "line", "choice", "attempt"]
    lost, again = (span for span in below(spans, root) if span.name == "attempt")
    assert lost.attributes is not None and again.attributes is not None
    assert lost.attributes["error.type"] == "WorkerLost"
    assert again.attributes["kvrelay.ended"] == "completed"
    assert [link.context.span_id for link in again.links] == [lost.context.span_id]

    calls = {instance(span): span for span in below(spans, lost) if span.kind is SpanKind.SERVER}
    assert {name: span.name for name, span in calls.items()} == {
        "p0": "prefill",
        answer.plans[0].decode_worker_id: "decode",
    }
    num_chunks = -(-answer.usage.num_prompt_tokens // SHAPE["max_step_tokens"])
    assert names(below(spans, calls["p0"])) == ["door", "queue", *["chunk"] * num_chunks, "handoff"]
    decoding = below(spans, calls[answer.plans[0].decode_worker_id])
    assert names(decoding) == ["reserve", "transfer", "decode"]
    states = [span for span in below(spans, lost) if span.kind is SpanKind.INTERNAL]
    assert names(states) == ["reserving", "prefilling", "handoff", "decoding"]


async def test_answer_that_moves_shows_where_it_went_and_what_it_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", 30.0)  # a busy machine may take long
    # A long prompt in small, slow steps: fetching it is faster than computing it again.
    slow = SHAPE | {"max_step_tokens": 16, "step_s": 0.03}
    async with running_system(num_prefill=0, num_decode=2, router={"policy": "predictive"}, **slow) as system:
        traced = trace(system)
        system.pace.slow_down(at=13)
        async with (
            system.client() as client,
            client.stream(PROMPT * 3, max_tokens=24, ignore_eos=True, seed=1) as events,
        ):
            async for event in events:
                if isinstance(event, PlanChosen):
                    left = event.decode_worker_id
                if isinstance(event, Token) and event.token_index == 10:
                    await drained(system, left)
                    system.pace.hurry()
                    break
            answer = await events.result()
        spans = await traced.spans()

    (root,) = [span for span in spans if span.parent is None]
    moved, again = (span for span in below(spans, root) if span.name == "attempt")
    assert moved.attributes is not None and "error.type" not in moved.attributes
    assert moved.attributes["kvrelay.ended"] == "moved"
    assert [link.context.span_id for link in again.links] == [moved.context.span_id]
    (call,) = (span for span in below(spans, again) if span.kind is SpanKind.SERVER)
    assert instance(call) == answer.plans[1].decode_worker_id != left
    assert names(below(spans, call)) == ["door", "pull", "queue", "prefill", "decode"]
    pull = dict(below(spans, call)[1].attributes or {})
    assert pull == {"kvrelay.source": left, "kvrelay.outcome": "pulled"}


async def test_stages_fill_their_parents_without_gaps_or_overlaps() -> None:
    async with running_system(router=REMOTE, **SHAPE) as system:
        traced = trace(system)
        async with system.client() as client:
            await client.generate(PROMPT, max_tokens=5)
        spans = await traced.spans()

    children = defaultdict(list)
    for span in spans:
        if span.parent is not None and span.kind is SpanKind.INTERNAL:
            children[span.parent.span_id].append(span)
    for parent in spans:
        times = [(span.start_time or 0, span.end_time or 0) for span in children[parent.context.span_id]]
        assert all(start <= end for start, end in times)
        assert all(end == start for (_, end), (start, _) in pairwise(times))


async def test_spans_follow_the_conventions_for_generative_ai_and_show_no_text() -> None:
    async with running_system(router=REMOTE, **SHAPE) as system:
        traced = trace(system)
        async with system.client() as client:
            answer = await client.generate(PROMPT, max_tokens=5, temperature=0.5, seed=3)
        spans = await traced.spans()

    (root,) = [span for span in spans if span.parent is None]
    shown = dict(root.attributes or {})
    assert root.name == f"text_completion {shown['gen_ai.request.model']}"
    assert shown["gen_ai.usage.input_tokens"] == answer.usage.num_prompt_tokens
    assert shown["gen_ai.usage.output_tokens"] == answer.usage.num_output_tokens
    assert shown["gen_ai.request.temperature"] == 0.5
    assert shown["gen_ai.request.max_tokens"] == 5
    assert shown["gen_ai.response.id"] == answer.request_id
    assert shown["gen_ai.response.time_to_first_chunk"] == pytest.approx(answer.timings.ttft_s)
    assert [event.name for event in root.events] == ["first token"]
    (choice,) = [span for span in spans if span.name == "choice"]
    costs: list[Any] = [(event.attributes or {})["kvrelay.cost"] for event in choice.events]
    assert costs == sorted(costs)
    everything = " ".join(span.to_json() for span in spans)
    assert "lighthouse" not in everything
    assert answer.text not in everything


async def test_trace_of_a_program_goes_on_through_the_client_into_the_cluster() -> None:
    async with running_system(router=REMOTE, **SHAPE) as system:
        traced = trace(system, TracingConfig(sample_rate=0.0))
        own = TracerProvider()
        own.add_span_processor(SimpleSpanProcessor(traced.exporter))
        async with system.client() as client:
            await client.generate(PROMPT, max_tokens=2)  # outside of any span, and the rate is 0
            with own.get_tracer("program").start_as_current_span("answer the user") as caller:
                await client.generate(PROMPT, max_tokens=2)
                await client.embed(PROMPT)
        spans = await traced.spans()

    (root,) = [span for span in spans if span.parent is None]
    assert root.context == caller.get_span_context()
    assert [span.name.partition(" ")[0] for span in below(spans, root)] == ["text_completion", "embeddings"]
