"""Exports spans to an OpenTelemetry collector. The only module that imports OpenTelemetry, and only when configured.

The SDK's batch processor queues spans and sends them on a thread of its own; when the collector is slow or gone, spans
are dropped, and nothing that serves waits. Its environment variables hold: `OTEL_EXPORTER_OTLP_HEADERS` for the key of
a collector, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_MAX_QUEUE_SIZE`, and the others.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.clock import Clock, SystemClock
from common.config import ConfigError, TracingConfig
from common.ports import is_here
from common.tracing import NO_TRACER, Span, SpanContext, Tracer
from common.version import installed_version

if TYPE_CHECKING:
    import requests
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

logger = logging.getLogger(__name__)

EXTRA = "kvrelay[otel]"
CLOSE_S = 2.0
_NS = 1_000_000_000
_KEY = "tracing.endpoint"
_PATH = "/v1/traces"


def check_installed(config: TracingConfig) -> None:
    """Raise ConfigError when traces are configured and OpenTelemetry is not installed here."""
    if config.endpoint is None:
        return
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_found = find_spec(name) is not None
        except ModuleNotFoundError:  # a parent of it
            is_found = False
        if not is_found:
            raise ConfigError(
                f"cannot trace: {name} is not installed; run `pip install '{EXTRA}'` on every host, or remove the key",
                key=_KEY,
            )


def make_tracer(config: TracingConfig, *, service: str, instance: str) -> Tracer:
    """Return the tracer of a process: `NO_TRACER` without `tracing.endpoint`.

    `service` and `instance` are its `service.name` and `service.instance.id`. Raises ConfigError when OpenTelemetry is
    not installed, or refuses its environment.
    """
    if config.endpoint is None:
        return NO_TRACER
    check_installed(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = config.endpoint.rstrip("/")
    exporter = OTLPSpanExporter(
        endpoint=endpoint if endpoint.endswith(_PATH) else endpoint + _PATH, session=_session(endpoint)
    )
    try:
        processor = BatchSpanProcessor(exporter)
    except ValueError as error:  # such as a queue that is smaller than a batch
        reason = str(error).rstrip(".")
        raise ConfigError(f"cannot trace: {reason}; change OTEL_BSP_* in the environment", key=_KEY) from error
    logger.info("tracing", extra={"endpoint": endpoint, "sample_rate": config.sample_rate})
    return SdkTracer(processor, SystemClock(), service=service, instance=instance)


def _session(endpoint: str) -> "requests.Session | None":
    """Return a session without the environment's proxy for a collector on this host; None: the exporter's own."""
    if not is_here(urlsplit(endpoint).hostname or ""):
        return None
    import requests  # comes with the exporter

    session = requests.Session()
    session.trust_env = False
    return session


class SdkTracer:
    """Hands spans to a processor of the SDK."""

    def __init__(self, processor: "SpanProcessor", clock: Clock, *, service: str, instance: str) -> None:
        """`clock` is the one by which the process stamps its work."""
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._trace, self._sdk = trace, sdk
        self._processor = processor
        self._clock = clock
        self._resource = Resource.create(
            {SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: installed_version()}
        )
        self._scope = InstrumentationScope("kvrelay", installed_version())

    def record(self, spans: Sequence[Span]) -> None:
        """Take spans for export; they are dropped when too many wait."""
        # One difference for all of them: a step of the system's time may not tear a trace.
        offset_ns = time.time_ns() - int(self._clock.monotonic() * _NS)
        for span in spans:
            self._processor.on_end(self._readable(span, lambda at_s: int(at_s * _NS) + offset_ns))

    def close(self) -> None:
        """Export what waits, for at most `CLOSE_S` seconds. Blocks."""
        # The SDK's own limit is 30 s, in which it tries again and again when the collector is gone.
        closing = threading.Thread(target=self._processor.shutdown, name="close tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _readable(self, span: Span, unix_ns: Callable[[float], int]) -> "ReadableSpan":
        trace, sdk, place = self._trace, self._sdk, self._place
        attributes = dict(span.attributes)
        status = trace.Status()
        if span.error:
            attributes["error.type"] = span.error
            status = trace.Status(trace.StatusCode.ERROR, span.error)
        readable: ReadableSpan = sdk.ReadableSpan(
            span.name,
            context=place(span.context),
            # A server's parent is in the process that called it.
            parent=None if span.parent is None else place(span.parent, is_remote=span.is_server),
            resource=self._resource,
            attributes=attributes,
            events=[sdk.Event(each.name, each.attributes, unix_ns(each.at_s)) for each in span.events],
            links=[trace.Link(place(each)) for each in span.links],
            kind=trace.SpanKind.SERVER if span.is_server else trace.SpanKind.INTERNAL,
            status=status,
            start_time=unix_ns(span.start_s),
            end_time=unix_ns(span.end_s),
            instrumentation_scope=self._scope,
        )
        return readable

    def _place(self, context: SpanContext, *, is_remote: bool = False) -> "trace.SpanContext":
        flags = self._trace.TraceFlags(int(context.is_sampled))
        return self._trace.SpanContext(context.trace_id, context.span_id, is_remote, flags)
