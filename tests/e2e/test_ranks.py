"""A cluster of a prefill worker of two ranks and of decode workers of one and three, which are killed in turn."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.changes.rollout import RolloutTerms
from cluster.control import rollout
from common.config import load_config, parse_config
from common.errors import KvrelayError
from common.fake_tokenizer import byte_tokenizer
from common.sampling import SamplingParams
from engine.ops.cpu.build import NotBuilt, find_compiler
from engine.ops.select import cpu_runs_kernels
from kvrelay.client import AsyncClient, Generation, PlanChosen, Token
from tests.e2e.harness import running_cluster, until, worker
from tests.engine.test_ranks import save
from worker.inprocess import LocalEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_TOKENS = 400
NUM_STREAMS = 2
PROMPT = [3 + 7 * i % 250 for i in range(200)]
OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}


async def test_answers_of_two_ranks_go_on_in_one_and_are_resumed_in_three_after_a_kill(tmp_path: Path) -> None:
    if isinstance(compiler := find_compiler(), NotBuilt) or not cpu_runs_kernels():
        pytest.skip(f"no compiled kernels: {compiler}")
    model_dir = tmp_path / "model"
    save(model_dir, "llama", vocab_size=272, max_position_embeddings=1024, num_key_value_heads=6)
    byte_tokenizer().save(str(model_dir / "tokenizer.json"))
    pool: dict[str, Any] = {"kv_memory_gib": 0.1}
    pools = {"prefill": pool | {"tensor_parallel": 2}, "decode": pool}
    config: dict[str, Any] = {
        "name": "ranks",
        "launcher": "local",
        "model": {"id": str(model_dir), "dtype": "bfloat16"},
        "pools": pools,
        "router": {"port": 0, "local_prefill_max_tokens": 0},
    }
    alone = LocalEngine.load(parse_config(config | {"pools": {"decode": pool}}, source="serving.yaml"))
    expected = [text.token_id for text in alone.stream(PROMPT, SamplingParams(**OPTIONS))][:NUM_TOKENS]
    async with running_cluster(tmp_path, config, timeout_s=300) as client:
        wanted = config | {"pools": pools | {"decode": pool | {"tensor_parallel": 3}}}
        changing = asyncio.create_task(roll_out(tmp_path, wanted))

        async def are_both_there() -> bool:
            workers = (await client.status()).workers
            return sum(each.role == "decode" and each.state == "ready" for each in workers) == 2

        await until(are_both_there, timeout_s=120, what="a decode worker of three ranks beside one of one")
        one, three = [(await worker(client, "decode", idx)).status for idx in range(2)]
        assert one is not None and three is not None
        ranks = psutil.Process(three.pid).children()
        prefilling = (await worker(client, "prefill")).status
        assert prefilling is not None and len(psutil.Process(prefilling.pid).children()) == 1
        assert not psutil.Process(one.pid).children() and len(ranks) == 2

        moved = await killed_on("decode-0", one.pid, client)
        assert all([*each.token_ids] == expected for each in moved)
        assert "prefill-0" in {each.plans[0].prefill_worker_id for each in moved}
        assert "decode-1" in {each.plan.decode_worker_id for each in moved if len(each.plans) > 1}

        moved = await killed_on("decode-1", ranks[-1].pid, client)
        assert all([*each.token_ids] == expected for each in moved)
        assert not psutil.wait_procs(ranks, timeout=60)[1], "ranks have outlived their worker"
    with pytest.raises(KvrelayError):  # the cluster has ended before the trial of the new worker has
        await changing


async def roll_out(folder: Path, config: dict[str, Any]) -> None:
    """Let a worker of another configuration serve beside the old ones."""
    path = folder / "next.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    terms = RolloutTerms(canary_s=300.0, max_slowdown=20.0, grace_s=30.0)
    await asyncio.to_thread(lambda: list(rollout(folder / "run", load_config(path), terms)))


async def killed_on(worker_id: str, pid: int, client: AsyncClient) -> list[Generation]:
    """Ask again and again, and kill a process once a worker decodes one of the answers; returns all answers."""
    decoding, is_killed = asyncio.Event(), False

    async def answers() -> list[Generation]:
        found: list[Generation] = []
        while not is_killed:
            stream, decoder = client.stream(PROMPT, **OPTIONS), ""
            async for event in stream:
                if isinstance(event, PlanChosen):
                    decoder = event.decode_worker_id
                if isinstance(event, Token) and decoder == worker_id:
                    decoding.set()
            found.append(await stream.result())
        return found

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(answers()) for _ in range(NUM_STREAMS)]
        await decoding.wait()
        os.kill(pid, signal.SIGKILL)
        is_killed = True
    return [each for task in running for each in task.result()]
