"""Two plain vLLM servers with our connector: answers to pulled prompts are those of one server, whatever breaks."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import torch

from benchmarks.peers.group import REPOSITORY, ArmSpec, end_group, log_tail, members, start_group
from common.rpc import channel_options
from engine.vllm.environment import ENVIRONMENT
from engine.weights.config import UnsupportedModel
from kvrelay.v1 import kv_transfer_pb2 as pb
from kvrelay.v1 import kv_transfer_pb2_grpc, worker_pb2
from tests.e2e.harness import until
from tests.vllm.conftest import shared_names

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

_BLOCK = 32
_LENGTHS = (1, 31, 32, 33, 64, 150)
_OFFER = {"do_remote_decode": True}
_PULL = {"do_remote_prefill": True}
_LEASE_TTL_S = 5.0
_NUM_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion."""

    text: str
    params: dict[str, Any] | None
    """Its `kv_transfer_params`."""


class _Connection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("vllm", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class VllmServer:
    """A server of vLLM on a Unix socket."""

    def __init__(self, folder: Path, model_dir: Path, kv_role: str, *, num_ranks: int = 1) -> None:
        self._log_path = folder / f"{kv_role}.log"
        transfer = {
            "kv_connector": "KvrelayConnector",
            "kv_connector_module_path": "worker.kv_connector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"ring_mib": 64, "lease_ttl_s": _LEASE_TTL_S},
        }
        options = ["--uds", str(folder / kv_role), "--served-model-name", "short", "--dtype", "float32"]
        options += ["--max-model-len", "512", "--block-size", str(_BLOCK), "--max-num-seqs", "8", "--enforce-eager"]
        options += ["--max-num-batched-tokens", "128", "--tensor-parallel-size", str(num_ranks)]
        options += ["--kv-cache-memory-bytes", str(64 << 20)]
        options += ["--kv-transfer-config", json.dumps(transfer)]
        # The command `vllm` does not start in the CPU build, whose distribution has another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), *options]
        environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        environment |= ENVIRONMENT | {"VLLM_CONFIGURE_LOGGING": "1", "TMPDIR": str(folder)}
        spec = ArmSpec(name=kv_role, command=command, env=environment)
        self._process = start_group(spec, log_path=self._log_path)
        self._socket = folder / kv_role

    async def until_up(self) -> None:
        """Wait until it answers."""

        async def is_up() -> bool:
            assert self._process.poll() is None, f"vLLM has ended:\n{log_tail(self._log_path)}"
            with contextlib.suppress(OSError):
                await self._call("GET", "/health")
                return True
            return False

        await until(is_up, timeout_s=240, what="vLLM answers")

    async def answer(self, prompt: list[int], params: dict[str, Any] | None = None, **changes: Any) -> Answer:
        """Return a greedy completion."""
        body = {"model": "short", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        if params is not None:
            body["kv_transfer_params"] = params
        found = json.loads(await self._call("POST", "/v1/completions", json.dumps(body | changes)))
        return Answer(text=found["choices"][0]["text"], params=found.get("kv_transfer_params"))

    async def offer(self, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt; returns the `kv_transfer_params` of the request that pulls it."""
        answer = await self.answer(prompt, _OFFER, max_tokens=1)
        assert answer.params is not None, log_tail(self._log_path)
        return answer.params

    async def num_pulled_tokens(self) -> int:
        """Return the tokens that it has begun to pull so far."""
        return await self.metric("external_prefix_cache_hits_total")

    async def metric(self, name: str) -> int:
        """Return the value of a counter of vLLM."""
        metrics = await self._call("GET", "/metrics")
        (count,) = re.findall(rf"^vllm:{name}\{{.*\}} (.*)$", metrics, re.MULTILINE)
        return int(float(count))

    def num_failed_pulls(self) -> int:
        """Return the pulls that have failed so far."""
        return self.log().count("cannot pull the prompt of")

    def log(self) -> str:
        """Return what it has logged."""
        return self._log_path.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill every process of it at once."""
        group = members(self._process.pid)
        os.killpg(self._process.pid, signal.SIGKILL)
        psutil.wait_procs(group, timeout=30)

    def stop(self) -> None:
        """End it, if it lives."""
        end_group(self._process, grace_s=20)

    async def _call(self, method: str, path: str, body: str = "") -> str:
        """Return the body of a reply, which has to be good."""

        def call() -> str:
            with contextlib.closing(_Connection(self._socket)) as connection:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                text = reply.read().decode()
                assert reply.status == http.HTTPStatus.OK, text
                return text

        return await asyncio.to_thread(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A server for prefill, and one for decode."""

    prefill: VllmServer
    decode: VllmServer
    names_before: set[str]
    """Names in shared memory before they were started."""

    async def alone(self, prompt: list[int]) -> str:
        """Return the decode server's own answer, from no cache."""
        return (await self.decode.answer(prompt, cache_salt=f"alone-{random.random()}")).text

    async def hands_over(self, prompt: list[int], source: VllmServer, target: VllmServer, num_pullers: int) -> bool:
        """Return whether a prompt was pulled; its answer is right also where a starved rank has lost its connection."""
        tokens, failed = await target.num_pulled_tokens(), target.num_failed_pulls()
        offered = await source.answer(prompt, _OFFER | {"num_pullers": num_pullers}, max_tokens=1)
        answer = await target.answer(prompt, offered.params)
        assert await target.num_pulled_tokens() == tokens + len(prompt), "it has not tried"
        assert answer.text == await self.alone(prompt)
        return target.num_failed_pulls() == failed

    async def after_failed_pull(self, prompt: list[int], params: dict[str, Any]) -> str:
        """Return the decode server's answer to a prompt whose pull has to fail."""
        before = await self.decode.num_pulled_tokens(), self.decode.num_failed_pulls()
        answer = await self.decode.answer(prompt, params)
        assert await self.decode.num_pulled_tokens() == before[0] + len(prompt), "it has not tried"
        assert self.decode.num_failed_pulls() == before[1] + 1
        return answer.text


@pytest.fixture(scope="module")
def servers(short_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    pair = Pair(
        names_before=shared_names(),
        prefill=VllmServer(folder, short_model_dir, "kv_producer"),
        decode=VllmServer(folder, short_model_dir, "kv_consumer"),
    )
    yield pair
    for server in (pair.prefill, pair.decode):
        server.stop()


@pytest.fixture
async def pair(servers: Pair) -> Pair:
    await servers.prefill.until_up()
    await servers.decode.until_up()
    return servers


def prompt_of(length: int, *, seed: int) -> list[int]:
    chance = random.Random(1000 * seed + length)
    return [chance.randrange(100, 40_000) for _ in range(length)]


class Relay(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Stands between two ranks, lets them talk by gRPC only, and may flip a bit on the way."""

    def __init__(self, channel: grpc.aio.Channel, *, flips_a_bit: bool) -> None:
        self._channel = channel
        self._flips_a_bit = flips_a_bit
        self.num_chunks = 0

    async def DescribePages(self, request: Any, context: Any) -> pb.DescribePagesResponse:
        return pb.DescribePagesResponse()

    async def FetchBlocks(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async def requests() -> AsyncIterator[pb.FetchBlocksRequest]:
            async for request in request_iterator:
                if request.WhichOneof("message") == "open":
                    request.open.transports[:] = [worker_pb2.KV_TRANSPORT_GRPC]
                yield request

        async for message in kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel).FetchBlocks(requests()):
            if message.WhichOneof("message") == "chunk":
                self.num_chunks += 1
                if self._flips_a_bit and self.num_chunks == 2:
                    data = bytearray(message.chunk.data)
                    data[len(data) // 2] ^= 1
                    message.chunk.data = bytes(data)
            await context.write(message)


@contextlib.asynccontextmanager
async def relayed(params: dict[str, Any], *, flips_a_bit: bool) -> AsyncIterator[tuple[Relay, dict[str, Any]]]:
    (rank,) = params["ranks"]
    async with grpc.aio.insecure_channel(rank["address"], options=channel_options()) as channel:
        relay = Relay(channel, flips_a_bit=flips_a_bit)
        server = grpc.aio.server(options=channel_options())
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(relay, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield relay, params | {"ranks": [rank | {"address": f"127.0.0.1:{port}"}]}
        finally:
            await server.stop(0)


def test_what_cannot_be_handed_over_is_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from engine.vllm.connector.plugin import check_supported

    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)

    def refusal(*specs: Any, pipeline: int = 1, cache_dtype: str = "auto") -> str:
        parallel = dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1)
        config = SimpleNamespace(
            model_config=SimpleNamespace(model="m"),
            parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline, **parallel),
            speculative_config=None,
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        )
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        try:
            check_supported(config, SimpleNamespace(kv_cache_groups=groups))
        except UnsupportedModel as error:
            return str(error)
        return ""

    assert refusal(full) == ""
    assert "its layers keep FullAttentionSpec, SlidingWindowSpec in 2 groups" in refusal(full, sliding)
    assert "its layers keep SlidingWindowSpec in 1 groups" in refusal(sliding)
    assert "with --pipeline-parallel-size, --kv-cache-dtype" in refusal(full, pipeline=2, cache_dtype="fp8")


async def test_pulled_prompts_are_answered_as_by_one_server(pair: Pair) -> None:
    prompts = [prompt_of(length, seed=1) for length in _LENGTHS]
    params = await asyncio.gather(*map(pair.prefill.offer, prompts))
    answers = await asyncio.gather(*(map(pair.decode.answer, prompts, params)))
    assert await pair.decode.num_pulled_tokens() == sum(_LENGTHS)
    assert pair.decode.num_failed_pulls() == 0
    assert await pair.decode.metric("kvrelay_pulls_total") == len(_LENGTHS)
    assert [each.text for each in answers] == [await pair.alone(prompt) for prompt in prompts]


async def test_prompts_are_pulled_while_they_are_computed(pair: Pair) -> None:
    ranks = (await pair.prefill.offer(prompt_of(1, seed=8)))["ranks"]
    for length in (31, 128, 500):
        prompt, handoff_id = prompt_of(length, seed=9), f"chosen-{length}"
        pull = asyncio.create_task(pair.decode.answer(prompt, _PULL | {"handoff_id": handoff_id, "ranks": ranks}))
        offered = await pair.prefill.answer(prompt, _OFFER | {"handoff_id": handoff_id}, max_tokens=1)
        assert offered.params is not None
        assert offered.params["ranks"] == ranks
        assert (await pull).text == await pair.alone(prompt)
    assert pair.decode.num_failed_pulls() == 0


async def test_a_pull_after_the_lease_is_computed_again(pair: Pair) -> None:
    prompt = prompt_of(100, seed=2)
    params = await pair.prefill.offer(prompt)

    async def has_expired() -> bool:
        return f"{params['handoff_id']}/0 expired" in pair.prefill.log()

    await until(has_expired, timeout_s=30, what="the lease ends")
    assert await pair.after_failed_pull(prompt, params) == await pair.alone(prompt)


async def test_pages_of_another_prompt_are_never_taken_for_this_one(pair: Pair) -> None:
    prompt, other = prompt_of(70, seed=3), prompt_of(70, seed=4)
    params = await pair.prefill.offer(prompt)
    assert await pair.after_failed_pull(other, params) == await pair.alone(other)


async def test_a_bit_that_flips_on_the_way_costs_a_computation_and_no_wrong_token(pair: Pair) -> None:
    prompt, other = prompt_of(90, seed=5), prompt_of(90, seed=6)
    async with relayed(await pair.prefill.offer(prompt), flips_a_bit=False) as (relay, params):
        answer = await pair.decode.answer(prompt, params)
        assert relay.num_chunks >= 2
    assert answer.text == await pair.alone(prompt)
    async with relayed(await pair.prefill.offer(other), flips_a_bit=True) as (_relay, params):
        text = await pair.after_failed_pull(other, params)
    assert text == await pair.alone(other)
    assert "checksum" in pair.decode.log()


async def test_servers_with_one_and_three_ranks_hand_over_to_each_other(
    pair: Pair, short_model_dir: Path, tmp_path: Path
) -> None:
    ranks = VllmServer(tmp_path, short_model_dir, "kv_both", num_ranks=3)
    try:
        await ranks.until_up()
        for source, target, num_pullers in ((ranks, pair.decode, 1), (pair.prefill, ranks, 3)):
            for length in (33, 150):
                prompts = [prompt_of(length, seed=10 * num_pullers + number) for number in range(_NUM_TRIES)]
                assert any([await pair.hands_over(prompt, source, target, num_pullers) for prompt in prompts])
    finally:
        ranks.stop()


async def test_a_killed_prefill_server_costs_a_computation_and_leaves_no_memory(pair: Pair) -> None:
    prompt = prompt_of(120, seed=7)
    params = await pair.prefill.offer(prompt)
    pair.prefill.kill()
    assert await pair.after_failed_pull(prompt, params) == await pair.alone(prompt)
    assert not shared_names() - pair.names_before, "memory or locks are left"
