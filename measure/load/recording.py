"""Writes live traffic as a trace that `measure.workload.traces` reads."""

import json
from pathlib import Path

from kvrelay.client.traffic import RecordedRequest
from measure.workload.traces import TraceError, TraceRequest, trace_row


class TrafficTrace:
    """Collects recorded requests and writes them in order of their arrivals."""

    def __init__(self) -> None:
        self._requests: list[RecordedRequest] = []

    @property
    def num_requests(self) -> int:
        """Requests so far."""
        return len(self._requests)

    def add(self, request: RecordedRequest) -> None:
        """Add a request. Raises TraceError when its block size differs, as after a change of workers."""
        if self._requests and request.block_size != self._requests[0].block_size:
            raise TraceError(
                f"blocks of {request.block_size} tokens after blocks of {self._requests[0].block_size}:"
                " the recording ends where the cluster's block size changed"
            )
        self._requests.append(request)

    def write(self, path: Path) -> None:
        """Write the requests, with block keys as small numbers in order of first appearance. Raises OSError.

        An answer without tokens is written as one token long, the least that the format allows; `outcome` tells why.
        """
        ids: dict[int, int] = {}
        with path.open("w", encoding="utf-8") as file:
            for request in sorted(self._requests, key=lambda request: request.arrival_s):
                row = trace_row(
                    TraceRequest(
                        arrival_s=request.arrival_s,
                        num_prompt_tokens=request.num_prompt_tokens,
                        num_output_tokens=max(1, round(request.num_output_tokens)),
                        block_ids=tuple(ids.setdefault(key, len(ids)) for key in request.block_keys),
                    )
                )
                row |= {"block_size": request.block_size, "outcome": request.outcome}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
