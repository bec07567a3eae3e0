"""A second cluster in the Ray of a site: a worker with ranks on one host, which answers as one rank and loses one."""

import asyncio
from pathlib import Path
from typing import Any

import yaml

from common.config import parse_config
from common.sampling import SamplingParams
from kvrelay.client import AsyncClient
from tests.e2e.harness import until, worker
from tests.hosts.network import Host
from tests.hosts.site import Site, workers_at
from tests.short_model import write_short_model
from worker.inprocess import LocalEngine

_NUM_RANKS = 3
_PORT = 50061
_NAME = "ranks"
_FOLLOWERS = "pgrep -f '[e]ngine.ranks.follower'"
_PROMPT = [3 + 7 * i % 4000 for i in range(200)]
_OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "max_tokens": 600, "ignore_eos": True}
_NUM_AGAIN = 100
_ENVIRONMENT = "RAY_AUTH_MODE=token RAY_USE_TLS=0 RAY_ADDRESS=auto"


async def lose_a_rank_in_mid_stream(site: Site, folder: Path) -> None:
    """Hand a prompt of one rank on one host to three on another, and kill one of these: the texts are one rank's.

    `folder`: every host sees it.
    """
    config = _config(await asyncio.to_thread(write_short_model, folder, num_layers=2, vocab_size=4096))
    expected = await asyncio.to_thread(_answer_of_one_rank, config)
    file = folder / "ranks.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    told = await asyncio.to_thread(site.cluster.kvrelay, f"up --config {file}", environment=_ENVIRONMENT)
    site.journal.note(f"kvrelay up, {_NUM_RANKS} ranks to a decode worker\n{told}")
    ca = folder / "ca.pem"
    ca.write_text(site.head.run(f"cat ~/.cache/kvrelay/run/{_NAME}/tls/ca.pem").stdout, encoding="ascii")
    async with AsyncClient(f"{site.head.address}:{_PORT}", timeout_s=120, tls=ca) as client:
        first, before = await _decode_host(site, client), await _epoch(client)
        ranks = _followers(first)
        assert len(ranks) == _NUM_RANKS - 1
        stream = client.stream(_PROMPT, **_OPTIONS)
        async for _event in stream:
            await asyncio.to_thread(first.run, f"kill -9 {ranks[-1]}")
            break
        moved = await stream.result()
        assert [*moved.token_ids] == expected
        assert len(moved.plans) > 1, "the answer was over when its rank was killed"

        async def is_replaced() -> bool:
            return await _epoch(client) != before

        await until(is_replaced, timeout_s=120, what="the worker starts again")
        second = await _decode_host(site, client)  # Ray chooses again
        site.journal.note(f"a rank on {first.name} was killed in mid-stream; its worker is replaced on {second.name}")
        assert len(_followers(second)) == _NUM_RANKS - 1
        assert not set(_followers(first)) & set(ranks), "ranks have outlived their worker"
        again = await client.generate(_PROMPT, **_OPTIONS | {"max_tokens": _NUM_AGAIN})
        assert [*again.token_ids] == expected[:_NUM_AGAIN]
    await asyncio.to_thread(site.cluster.kvrelay, f"down --config {file}")
    assert not any(_followers(each) for each in site.others)
    site.journal.note("kvrelay down; no rank is left")


async def _decode_host(site: Site, client: AsyncClient) -> Host:
    """Return the host of the decode worker, once both workers are ready. The prefill worker is on another."""
    where = await workers_at(client, count=2)
    assert where["decode-0"] != where["prefill-0"]
    (host,) = (each for each in site.others if each.address == where["decode-0"])
    return host


async def _epoch(client: AsyncClient) -> int:
    """Return what tells the present decode worker from the one before; process ids are a host's own."""
    view = await worker(client, "decode")
    return view.status.epoch if view.status is not None else 0


def _config(model_dir: Path) -> dict[str, Any]:
    pool = {"kv_memory_gib": 0.1, "num_cpus": 0}  # the site's own workers reserve all cores
    return {
        "name": _NAME,
        "launcher": "ray",
        "model": {"id": str(model_dir), "dtype": "float32"},
        "pools": {"prefill": pool, "decode": pool | {"tensor_parallel": _NUM_RANKS}},
        "router": {"host": "0.0.0.0", "port": _PORT, "http_port": None, "local_prefill_max_tokens": 0},
    }


def _answer_of_one_rank(config: dict[str, Any]) -> list[int]:
    pools = {"decode": config["pools"]["prefill"]}
    alone = LocalEngine.load(parse_config(config | {"pools": pools}, source="ranks.yaml"))
    return [text.token_id for text in alone.stream(_PROMPT, SamplingParams(**_OPTIONS))][: _OPTIONS["max_tokens"]]


def _followers(host: Host) -> list[int]:
    """Return the process ids of ranks on a host, without the first ones."""
    return [int(pid) for pid in host.run(_FOLLOWERS, check=False).stdout.split()]
