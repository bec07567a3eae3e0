"""Draws the trace of an answer that loses its decode worker: `python -m benchmarks.trace_picture --svg FILE`.

Method. A cluster of real processes (launcher local, fake engines at 4 ms a step, one prefill worker, two decode
workers) sends its spans to a collector in this process. One prompt of 400 tokens is handed over; when the 12th of 32
tokens has come, its decode worker is killed with SIGKILL, and the answer goes on at the other one. A killed worker
sends no spans: what it did stands only in the router's.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal
from benchmarks.otlp_collector import Collector, ReceivedSpan, running_collector
from kvrelay.client import AsyncClient, PlanChosen, Token

_TIMEOUT_S = 30.0
_ROW, _LABEL, _WIDTH, _TOP = 19, 300, 980, 46
_COLOURS = ("#00796b", "#3949ab", "#c77700", "#ad1457", "#5d4037")


async def lose_a_decode_worker(address: str) -> None:
    """Send one request, and kill the worker that answers it in the middle."""
    async with AsyncClient(address, timeout_s=60) as client:
        workers = {view.worker_id: view.status.pid for view in (await client.status()).workers if view.status}
        prompt = [number * 7 % 256 for number in range(400)]
        async with client.stream(prompt, temperature=0, max_tokens=32, ignore_eos=True) as events:
            async for event in events:
                if isinstance(event, PlanChosen):
                    decode = event.decode_worker_id
                if isinstance(event, Token) and event.token_index == 11:
                    os.kill(workers.pop(decode), signal.SIGKILL)


async def whole_trace(collector: Collector) -> list[ReceivedSpan]:
    """Wait for a trace whose first span, and the decode of whose last attempt, have come."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            spans = collector.spans()
            if any(not span.parent_id for span in spans) and any(span.name == "decode" for span in spans):
                return spans
            await asyncio.sleep(0.2)


def rows(spans: Sequence[ReceivedSpan], parent: bytes = b"", depth: int = 0) -> Iterator[tuple[int, ReceivedSpan]]:
    """Yield each span below a parent with its depth, children behind their parent."""
    for span in spans:
        if span.parent_id == parent:
            yield depth, span
            yield from rows(spans, span.span_id, depth + 1)


def drawing(spans: Sequence[ReceivedSpan]) -> str:
    """Return an SVG of a trace: a line for each span, a colour for each process."""
    lines = list(rows(spans))
    start, end = min(span.start_ns for _, span in lines), max(span.end_ns for _, span in lines)
    per_ns = (_WIDTH - _LABEL - 90) / (end - start)
    instances = list(dict.fromkeys(span.instance for _, span in lines))
    colour = dict(zip(instances, _COLOURS, strict=False))
    parts = []
    for number, name in enumerate(instances):
        left = 14 + number * 130
        parts.append(f'<rect x="{left}" y="12" width="12" height="12" rx="2" fill="{colour[name]}"/>')
        parts.append(f'<text x="{left + 18}" y="22">{escape(name)}</text>')
    for number, (depth, span) in enumerate(lines):
        y = _TOP + number * _ROW
        x, width = _LABEL + (span.start_ns - start) * per_ns, max(2.0, (span.end_ns - span.start_ns) * per_ns)
        label = span.name + (f" ({span.error})" if span.error else "") + (" ↩" if span.num_links else "")
        if number % 2:
            parts.append(f'<rect x="0" y="{y - 3}" width="{_WIDTH}" height="{_ROW}" fill="#f3f5f5"/>')
        parts.append(f'<text x="{14 + depth * 16}" y="{y + 11}">{escape(label)}</text>')
        edge = ' stroke="#b71c1c" stroke-width="2"' if span.error else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="13" rx="2" fill="{colour[span.instance]}"{edge}>'
            f"<title>{escape(span.name)}, {escape(span.instance)}</title></rect>"
        )
        time = f"{(span.end_ns - span.start_ns) / 1e6:.1f} ms"
        parts.append(f'<text x="{_WIDTH - 12}" y="{y + 11}" text-anchor="end" fill="#555">{time}</text>')
    height = _TOP + len(lines) * _ROW + 8
    title = "Trace of a request through prefill, decode, the loss of its decode worker, and a second plan"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}"'
        f' font-family="ui-monospace, monospace" font-size="12" fill="#1c2526"><title>{title}</title>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    """Run the cluster, and write the picture."""
    parser = command_line("trace_picture", __doc__)
    parser.add_argument("--svg", type=Path, required=True, help="file for the picture")
    args = parser.parse_args()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    with (
        running_collector() as collector,
        running_doors(
            launcher="local",
            console=terminal(),
            model={"engine": "fake", "fake_step_ms": 4.0, "max_model_len": 4096},
            pools={"prefill": {"max_step_tokens": 128}, "decode": {"count": 2}},
            router={"local_prefill_max_tokens": 0},
            tracing={"endpoint": collector.url, "sample_rate": 1.0},
        ) as (info, _config),
    ):
        asyncio.run(lose_a_decode_worker(info.address))
        spans = asyncio.run(whole_trace(collector))
    args.svg.parent.mkdir(parents=True, exist_ok=True)
    args.svg.write_text(drawing(spans), encoding="utf-8")
    terminal().print(f"{args.svg}: {len(list(rows(spans)))} of {len(spans)} spans")


if __name__ == "__main__":
    main()
