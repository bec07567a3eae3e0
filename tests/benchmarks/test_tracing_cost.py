"""Spans that are measured and drawn are those that processes sent."""

import urllib.request
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.otlp_collector import ReceivedSpan, running_collector
from benchmarks.trace_picture import drawing, rows
from benchmarks.tracing_cost import is_traced
from common.config import TracingConfig
from common.otlp import make_tracer
from common.tracing import Span, SpanContext


def span(name: str, parent: str = "", *, start: int = 0, end: int = 10, error: str = "") -> ReceivedSpan:
    return ReceivedSpan(
        name=name,
        instance="router-0",
        span_id=name.encode(),
        parent_id=parent.encode(),
        start_ns=start * 1_000_000,
        end_ns=end * 1_000_000,
        error=error,
        num_links=0,
    )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.1, 40), (0.25, 100), (1.0, 400)])
def test_share_of_traced_requests_is_exact_and_evenly_spread(share: float, expected: int) -> None:
    traced = [is_traced(number, share) for number in range(400)]
    assert sum(traced) == expected
    assert sum(traced[:200]) == expected // 2


def test_collector_has_the_spans_of_a_process_with_their_errors_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
    monkeypatch.setattr("common.otlp.CLOSE_S", 60.0)
    with running_collector() as collector:
        tracer = make_tracer(TracingConfig(endpoint=collector.url), service="kvrelay-router", instance="router-0")
        root = SpanContext.root()
        child = Span(
            name="attempt",
            context=root.child(),
            parent=root,
            start_s=1.0,
            end_s=1.25,
            attributes={},
            links=(root,),
            error="WorkerLost",
        )
        tracer.record([Span(name="request", context=root, parent=None, start_s=1.0, end_s=2.0, attributes={}), child])
        tracer.close()
        with urllib.request.urlopen(f"{collector.url}/spans", timeout=30) as answer:
            assert answer.read() == b"2"
        found = {each.name: each for each in collector.spans()}

    assert found["attempt"].parent_id == found["request"].span_id == root.span_id.to_bytes(8, "big")
    assert (found["attempt"].error, found["attempt"].num_links) == ("WorkerLost", 1)
    assert found["attempt"].end_ns - found["attempt"].start_ns == 250_000_000
    assert (found["request"].instance, found["request"].parent_id) == ("router-0", b"")


def test_picture_shows_every_span_of_a_trace_below_its_parent() -> None:
    spans = [span("request"), span("line", "request", end=2), span("attempt", "request", start=2, error="Worker<Lost>")]
    spans += [span("decode", "attempt", start=3)]
    assert [(depth, each.name) for depth, each in rows(spans)] == [
        (0, "request"),
        (1, "line"),
        (1, "attempt"),
        (2, "decode"),
    ]
    texts = [each.text for each in ElementTree.fromstring(drawing(spans)).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "router-0",
        *("request", "10.0 ms"),
        *("line", "2.0 ms"),
        *("attempt (Worker<Lost>)", "8.0 ms"),
        *("decode", "7.0 ms"),
    ]
