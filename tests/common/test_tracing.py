"""The seam of traces: the standard's header, stages as spans, the export, and nothing of it where traces are off."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from common.config import ConfigError, TracingConfig, parse_config
from common.errors import Overloaded
from common.otlp import SdkTracer, make_tracer
from common.tracing import (
    MAX_STAGES,
    NO_STAGES,
    NO_TRACER,
    Span,
    SpanContext,
    StampedStages,
    parse_traceparent,
    tracing_call,
)
from kvrelay.client.requests import trace_context
from tests.clock import ManualClock

PLACE = SpanContext(trace_id=0x0AF7651916CD43DD8448EB211C80319C, span_id=0xB7AD6B7169203331)
HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of the standard


class Kept:
    """A tracer that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        raise AssertionError("the tests close nothing")


@given(
    st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans(), st.sampled_from(["", " ", "\t", "  "])
)
def test_place_in_a_trace_survives_the_way_to_another_process(
    trace_id: int, span_id: int, is_sampled: bool, space: str
) -> None:
    place = SpanContext(trace_id=trace_id, span_id=span_id, is_sampled=is_sampled)
    assert parse_traceparent(space + place.traceparent + space) == place


def test_header_is_the_one_of_the_standard() -> None:
    assert PLACE.traceparent == HEADER
    assert parse_traceparent(HEADER) == PLACE
    assert parse_traceparent("cc" + HEADER[2:] + "-what-the-future-will-be-like") == PLACE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "ff" + HEADER[2:],
        HEADER + "-more",
        HEADER.upper(),
        HEADER.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        HEADER.replace("b7ad6b7169203331", "0" * 16),
        HEADER + "\n" + HEADER,
    ],
)
def test_header_that_is_none_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


@given(st.text(max_size=80))
def test_no_text_of_a_client_breaks_the_parser(text: str) -> None:
    assert parse_traceparent(text) is None or "-" in text


def test_each_stage_ends_when_the_next_one_begins() -> None:
    clock = ManualClock(5.0)
    stages = StampedStages(clock, begun_s=4.0)
    stages.enter("queue")
    clock.advance(2.0)
    stages.enter("chunk", after_s=0.5, num_cached_tokens=16)
    clock.advance(1.0)
    stages.enter("decode")
    spans = list(stages.spans(PLACE, 9.0))
    assert [(span.name, span.start_s, span.end_s) for span in spans] == [
        ("queue", 4.0, 4.5),
        ("chunk", 4.5, 8.0),
        ("decode", 8.0, 9.0),
    ]
    assert spans[1].attributes == {"kvrelay.num_cached_tokens": 16}
    assert {span.parent for span in spans} == {PLACE}
    assert len({span.context.span_id for span in spans}) == 3


def test_prompt_of_ten_thousand_chunks_makes_a_bounded_trace() -> None:
    stages = StampedStages(ManualClock())
    for number in range(10_000):
        stages.enter("chunk", num_computed_tokens=number)
    spans = list(stages.spans(PLACE, 1.0))
    assert len(spans) == MAX_STAGES
    assert spans[-1].attributes == {"kvrelay.num_computed_tokens": 9_999}


@pytest.mark.parametrize("traceparent", ["", "nonsense", HEADER[:-1] + "0"])
def test_call_that_is_not_sampled_records_nothing(traceparent: str) -> None:
    kept = Kept()
    with tracing_call(kept, ManualClock(), traceparent, "prefill") as stages:
        assert stages is NO_STAGES
    assert kept.spans == []


def test_call_that_fails_names_its_error() -> None:
    kept = Kept()
    with pytest.raises(ZeroDivisionError), tracing_call(kept, ManualClock(), HEADER, "prefill", worker="p0") as stages:
        stages.enter("door")
        _ = 1 / 0
    call, door = kept.spans
    assert (call.error, call.parent, call.attributes) == ("ZeroDivisionError", PLACE, {"kvrelay.worker": "p0"})
    assert (door.name, door.parent) == ("door", call.context)


def test_call_refused_before_its_first_stage_keeps_its_error() -> None:
    kept = Kept()
    with pytest.raises(Overloaded), tracing_call(kept, ManualClock(), HEADER, "decode"):
        raise Overloaded("another quarantined request runs here", retry_after_s=1.0)
    assert [(span.name, span.error) for span in kept.spans] == [("decode", "Overloaded")]


def test_nothing_of_opentelemetry_is_loaded_where_traces_are_off() -> None:
    script = """
import sys
import cluster.wiring, cluster.worker_process.server, router.server
from common.config import TracingConfig
from common.otlp import check_installed, make_tracer
from common.tracing import NO_TRACER
check_installed(TracingConfig())
assert make_tracer(TracingConfig(), service="s", instance="i") is NO_TRACER
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_client_sends_its_request_while_another_thread_imports_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    assert trace_context() == ()


def test_traces_without_the_extra_stop_the_start_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"`pip install 'kvrelay\[otel\]'`") as refused:
        make_tracer(TracingConfig(endpoint="http://127.0.0.1:4318"), service="s", instance="i")
    assert refused.value.key == "tracing.endpoint"


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://collector:4317", "http://", "http://key@collector", "http://collector?key=1"]
)
def test_endpoint_that_is_no_address_or_holds_a_secret_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        parse_config({"tracing": {"endpoint": endpoint}}, source="serving.yaml")


def test_queue_smaller_than_a_batch_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "256")
    with pytest.raises(ConfigError, match=r"^cannot trace: .*OTEL_BSP_"):
        make_tracer(TracingConfig(endpoint="http://127.0.0.1:4318"), service="s", instance="i")


def test_process_ends_in_time_when_the_collector_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
    answered = threading.Event()

    class Stuck:
        """A processor whose last export waits for the collector."""

        def shutdown(self) -> None:
            answered.wait()

    monkeypatch.setattr("common.otlp.CLOSE_S", 0.05)
    processor: Any = Stuck()
    closing = threading.Thread(target=SdkTracer(processor, SystemClock(), service="s", instance="i").close, daemon=True)
    closing.start()
    closing.join(20)
    try:
        assert not closing.is_alive()
    finally:
        answered.set()


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Serve as a collector: yields its address, and the paths and bodies that it gets."""
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_collector_gets_the_spans_at_the_latest_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setattr("common.otlp.CLOSE_S", 60.0)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of a company, which leads to other hosts
    with collector() as (address, taken):
        tracer = make_tracer(TracingConfig(endpoint=address), service="kvrelay-worker", instance="decode-0")
        assert tracer is not NO_TRACER
        with tracing_call(tracer, SystemClock(), HEADER, "decode", worker="decode-0") as stages:
            stages.enter("transfer", kv_bytes=4096)
        root = SpanContext.root()
        attempt = Span(
            name="attempt",
            context=root.child(),
            parent=root,
            start_s=1.0,
            end_s=1.25,
            attributes={},
            links=(PLACE,),
            error="WorkerLost",
        )
        tracer.record([attempt])
        tracer.close()

    ((path, body),) = taken
    assert path == "/v1/traces"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert about["service.name"] == "kvrelay-worker"
    assert about["service.instance.id"] == "decode-0"
    assert about["deployment.environment"] == "test"
    call, transfer, failed = resource_spans.scope_spans[0].spans
    assert call.trace_id.hex() == HEADER.split("-")[1]
    assert call.parent_span_id.hex() == HEADER.split("-")[2]
    assert transfer.parent_span_id == call.span_id
    assert transfer.attributes[0].value.int_value == 4096
    assert failed.parent_span_id.hex() == f"{root.span_id:016x}"
    assert failed.end_time_unix_nano - failed.start_time_unix_nano == 250_000_000
    assert [link.trace_id.hex() for link in failed.links] == [HEADER.split("-")[1]]
    assert {each.key: each.value.string_value for each in failed.attributes} == {"error.type": "WorkerLost"}
