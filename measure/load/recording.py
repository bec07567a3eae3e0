"""Recordings of live traffic as traces, which `measure.workload.traces` reads."""

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
        """Take a request. Raises TraceError when its blocks have another size: the workers were replaced meanwhile."""
        if self._requests and request.block_size != self._requests[0].block_size:
            raise TraceError(
                f"blocks of {request.block_size} tokens after blocks of {self._requests[0].block_size}:"
                " the recording ends where the cluster's block size changed"
            )
        self._requests.append(request)

    def write(self, path: Path) -> None:
        """Write what was collected, block keys as small numbers in order of their first appearance. Raises OSError.

        An answer without tokens counts as one token long, as the format knows no others; `outcome` tells.
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
