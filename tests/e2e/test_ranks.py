"""A cluster whose prefill worker is one process and whose decode worker is three."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config import parse_config
from common.sampling import SamplingParams
from engine.ops.cpu.build import NotBuilt, find_compiler
from engine.ops.select import cpu_runs_kernels
from tests.e2e.harness import running_cluster, until, until_idle, worker
from tests.short_model import write_short_model
from worker.inprocess import LocalEngine

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 300


async def test_answers_of_workers_with_ranks_are_those_of_one_process_also_after_a_kill(tmp_path: Path) -> None:
    if isinstance(compiler := find_compiler(), NotBuilt) or not cpu_runs_kernels():
        pytest.skip(f"no compiled kernels: {compiler}")
    (tmp_path / "model").mkdir()
    model_dir = write_short_model(tmp_path / "model", num_layers=2, vocab_size=4096)
    prompt = [3 + 7 * i % 4000 for i in range(200)]
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 4,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    pool = {"kv_memory_gib": 0.1}
    config: dict[str, Any] = {
        "name": "ranks",
        "model": {"id": str(model_dir), "dtype": "bfloat16"},
        "pools": {"prefill": pool, "decode": pool | {"tensor_parallel": 3}},
        "router": {"port": 0, "local_prefill_max_tokens": 0},
    }
    alone = LocalEngine.load(parse_config(config | {"pools": {"decode": pool}}, source="serving.yaml"))
    expected = [text.token_id for text in alone.stream(prompt, SamplingParams(**options))][:NUM_TOKENS]
    async with running_cluster(tmp_path, config, timeout_s=300) as client:
        assert [*(await client.generate(prompt, **options)).token_ids] == expected
        view = await worker(client, "decode")
        assert view.status is not None
        pid, ranks = view.status.pid, psutil.Process(view.status.pid).children()
        assert len(ranks) == 2
        stream = client.stream(prompt, **options)
        async for _event in stream:
            os.kill(ranks[-1].pid, signal.SIGKILL)
            break
        assert [*(await stream.result()).token_ids] == expected

        async def restarted() -> bool:
            view = await worker(client, "decode")
            return view.status is not None and view.status.pid != pid

        await until(restarted, timeout_s=120, what="the worker starts again")
        assert not psutil.wait_procs(ranks, timeout=60)[1], "ranks have outlived their worker"
        assert [*(await client.generate(prompt, **options)).token_ids] == expected
        await until_idle(client)
