"""Clusters of vLLM's own engines: the answers are plain `transformers`', over every way that KV travels."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import InvalidRequest
from common.model_files import default_model_dir
from engine.ops.cpu.build import NotBuilt, find_compiler
from kvrelay.client import AsyncClient
from tests.e2e.harness import killed_midway, running_cluster, until, until_idle, worker
from tests.e2e.test_oracle import Oracle
from tests.vllm.conftest import shared_names

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

_LENGTHS = (1, 2, 31, 32, 33, 64, 95, 129, 200)
MAX_TOKENS = 12


def config_of(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a serving.yaml for vLLM in fp32; each change names a pool or a section."""
    pool = {"num_blocks": 64, "max_step_tokens": 64, "max_running": 8, "threads": 1}
    model = {"id": str(model_dir), "engine": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512}
    return {
        "name": "vllm",
        "launcher": "local",
        "model": model | changes.get("model", {}),
        "pools": {"prefill": pool | changes.get("prefill", {}), "decode": pool | changes.get("decode", {})},
        "router": {"port": 0, "local_prefill_max_tokens": 0, "queue_timeout_s": 300.0, "recovery_timeout_s": 300.0},
        "transfer": changes.get("transfer", {}),
        "slo": {"ttft_s": 600.0, "tpot_s": 600.0},
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    text = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")).ids
    return [text[17 * i : 17 * i + length] for i, length in enumerate(_LENGTHS)]


@pytest.fixture(scope="module")
def oracle(short_model_dir: Path) -> Oracle:
    return Oracle(short_model_dir)


async def _check(client: AsyncClient, prompts: list[list[int]], oracle: Oracle) -> None:
    answers = await asyncio.gather(*(client.generate(p, temperature=0.0, max_tokens=MAX_TOKENS) for p in prompts))
    judged = [(len(p), oracle.complaint(p, a.token_ids)) for p, a in zip(prompts, answers, strict=True)]
    assert not [found for found in judged if found[1]]


async def _check_twice(client: AsyncClient, prompts: list[list[int]], oracle: Oracle, transport: str) -> None:
    """Check answers whose KV is handed over by a transport, then the same ones from caches."""
    await _check(client, prompts, oracle)
    await _check(client, prompts, oracle)
    transports = set()
    for length in range(len(prompts[-1]), len(prompts[-1]) - 4, -1):  # on a busy host a plan may be local
        answer = await client.generate(prompts[-1][:length][::-1], temperature=0.0, max_tokens=2)
        assert answer.transfer is not None
        transports.add(answer.transfer.transport)
    assert transport in transports
    await until_idle(client)


@pytest.mark.parametrize("kernels", ["auto", "compile"])
async def test_answers_are_those_of_transformers_also_after_a_decode_workers_kill(
    tmp_path: Path, kernels: str, prompts: list[list[int]], short_model_dir: Path, oracle: Oracle
) -> None:
    """Greedy ones, handed over and cached; then what is refused, and a sampled one that loses its worker."""
    if kernels == "compile" and isinstance(compiler := find_compiler(), NotBuilt):
        pytest.skip(compiler.reason)
    config = config_of(short_model_dir, model={"kernels": kernels}, transfer={"transports": ["shm"]})
    async with running_cluster(tmp_path, config, timeout_s=600) as client:
        await _check_twice(client, prompts, oracle, "shm")
        options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 60, "ignore_eos": True}
        alone = await client.generate(prompts[-1], **options)
        with pytest.raises(InvalidRequest, match="vllm has no beam search"):
            await client.generate(prompts[-1], n=2, use_beam_search=True)
        with pytest.raises(InvalidRequest, match="cannot embed"):
            await client.embed(prompts[-1])
        (killed,) = await killed_midway(client, partial(client.stream, prompts[-1], **options))
        assert killed.token_ids == alone.token_ids
        await until_idle(client, timeout_s=300)


@pytest.mark.parametrize(("pool", "transport"), [("prefill", "grpc"), ("decode", "nixl")])
async def test_workers_of_three_ranks_and_of_one_hand_over_and_end_as_one_process(
    tmp_path: Path, pool: str, transport: str, prompts: list[list[int]], short_model_dir: Path, oracle: Oracle
) -> None:
    """A prefill worker loses a rank, a decode worker the process that the ranks belong to."""
    if transport == "nixl":
        pytest.importorskip("nixl")
    before = shared_names()
    config = config_of(short_model_dir, transfer={"transports": [transport]}, **{pool: {"tensor_parallel": 3}})
    async with running_cluster(tmp_path, config, timeout_s=600) as client:
        await _check_twice(client, prompts, oracle, transport)
        view = await worker(client, pool)
        assert view.status is not None
        pid = view.status.pid
        below = psutil.Process(pid).children(recursive=True)
        ranks = [each for each in below if not any("resource_tracker" in word for word in each.cmdline())]
        assert len(ranks) == 4, [each.cmdline() for each in below]  # and vLLM's engine core
        os.kill(ranks[-1].pid if pool == "prefill" else pid, signal.SIGKILL)
        await until(lambda: _is_another(client, pool, pid), timeout_s=300, what="the worker starts again")
        assert not psutil.wait_procs(ranks, timeout=60)[1], "ranks have outlived their worker"
        await _check(client, prompts[-1:], oracle)
    assert not shared_names() - before, "shared memory is left"


async def test_worker_of_three_ranks_is_one_actor_of_ray_and_leaves_no_rank(
    tmp_path: Path, prompts: list[list[int]], short_model_dir: Path, oracle: Oracle
) -> None:
    pytest.importorskip("ray")
    before = shared_names()
    config = config_of(short_model_dir, prefill={"tensor_parallel": 3}) | {"launcher": "ray"}
    async with running_cluster(tmp_path, config, timeout_s=600) as client:
        await _check(client, prompts[3:6], oracle)
        view = await worker(client, "prefill")
        assert view.status is not None
        ranks = psutil.Process(view.status.pid).children(recursive=True)
    assert len(ranks) >= 4
    assert not psutil.wait_procs(ranks, timeout=60)[1], "ranks have outlived their worker"
    assert not shared_names() - before, "shared memory is left"


async def _is_another(client: AsyncClient, pool: str, pid: int) -> bool:
    view = await worker(client, pool)
    return view.status is not None and view.status.pid != pid
