"""The share of traced requests is the one that was asked for, and the collector counts what processes sent."""

import pytest

from benchmarks.tracing_cost import is_traced, num_spans, running_sink
from common.config import TracingConfig
from common.otlp import make_tracer
from common.tracing import Span, SpanContext


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.1, 40), (0.25, 100), (1.0, 400)])
def test_share_of_traced_requests_is_exact_and_evenly_spread(share: float, expected: int) -> None:
    traced = [is_traced(number, share) for number in range(400)]
    assert sum(traced) == expected
    assert sum(traced[:200]) == expected // 2


def test_collector_counts_every_span_that_a_process_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
    monkeypatch.setattr("common.otlp.CLOSE_S", 60.0)
    root = SpanContext.root()
    with running_sink() as sink:
        tracer = make_tracer(TracingConfig(endpoint=sink), service="kvrelay-router", instance="router-0")
        spans = [
            Span(name=name, context=context, parent=None, start_s=1.0, end_s=2.0, attributes={})
            for name, context in (("request", root), ("attempt", root.child()))
        ]
        tracer.record(spans)
        tracer.close()
        assert num_spans(sink) == 2
