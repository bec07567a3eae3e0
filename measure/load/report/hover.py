"""What a request says under the mouse."""

from measure.load.records import RequestRecord
from measure.pages.figures import plain
from measure.pages.wording import duration, scaled


def hover_text(request: RequestRecord) -> str:
    """Return everything known about a request, in lines for plotly."""
    server = request.server
    cached = "" if server.num_cached_tokens is None else f" ({server.num_cached_tokens:,} cached"
    if cached:
        cached += f", {server.num_pulled_tokens:,} of them pulled)" if server.num_pulled_tokens else ")"
    lines = [
        f"<b>request {request.index}</b>: {plain(request.kind)}, session {request.session}, turn {request.turn + 1}",
        f"{request.num_prompt_tokens:,} prompt tokens{cached}, {request.num_output_tokens:,} of"
        f" {request.num_wanted_tokens:,} output tokens",
        " · ".join(
            f"{name} {duration(value)}"
            for name, value in (
                ("queue", server.queue_s),
                ("prefill", server.prefill_s),
                ("transfer", server.transfer_s),
                ("of which shows", server.transfer_exposed_s),
            )
            if value is not None
        ),
        " · ".join(
            f"{name} {duration(value)}"
            for name, value in (("TTFT", request.ttft_s), ("TPOT", request.tpot_s), ("E2E", request.e2e_s))
            if value is not None
        ),
        plain(" → ".join(worker for worker in (server.prefill_worker, server.decode_worker) if worker)),
        f"{scaled(server.transfer_bytes, 'B')} by {plain(server.transport or '?')}" if server.transfer_bytes else "",
        f"sent {duration(request.lag_s)} late" if request.lag_s > 0.001 else "",
        "" if request.is_complete else f"<b>{request.outcome}</b>: {plain(request.error[:160])}",
    ]
    return "<br>".join(line for line in lines if line)
