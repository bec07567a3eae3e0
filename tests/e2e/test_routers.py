"""Two routers as processes: strangers get nothing, and neither a kill nor a rollout costs an answer."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI

from benchmarks.faults import listening_ports
from cluster.lifecycle import ClusterInfo
from cluster.processes.state import StateFile
from kvrelay.client import AsyncClient
from tests.e2e.harness import FAKE_POOL, fake_config, pids, process_of, reporting_workers, standing_cluster, until
from tests.e2e.streams import NUM_STREAMS, Load, answer, answers, repeated_streams, running_streams
from tests.e2e.test_rollout import LOAD, assert_nothing_was_lost, client_of, roll_out, running_config

pytestmark = pytest.mark.e2e

CONFIG = fake_config(step_ms=60.0, router={"port": 0, "count": 2, "local_prefill_max_tokens": 32})


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """A cluster with two routers, which the tests use in their order."""
    with standing_cluster(tmp_path_factory.mktemp("two-routers"), CONFIG) as info:
        yield info


async def policy_of(address: str) -> str:
    async with AsyncClient(address, timeout_s=120) as client:
        return (await client.status()).router.policy


async def fingerprint_of(address: str) -> str:
    async with AsyncClient(address, timeout_s=120) as client:
        (model,) = await client.models()
        return model.fingerprint


async def test_streams_of_a_killed_router_end_with_the_same_texts_and_it_comes_back(info: ClusterInfo) -> None:
    first, second = info.addresses
    async with AsyncClient([first, second], timeout_s=120) as one, AsyncClient([second, first], timeout_s=120) as other:
        before = process_of(info.run_dir, "router-0").identity
        assert before is not None
        # A router loads what structures need with the first: on a busy machine for longer than other answers take.
        await asyncio.gather(answers(one, num_tokens=4), answers(other, num_tokens=4))
        async with running_streams(one, other, num_tokens=80) as running:
            before.signal(signal.SIGKILL)
        assert one.address == other.address == second
        done = [task.result() for task in running]

        assert max(len(each.plans) for each in done[::2]) == 2  # those of the one that was killed
        assert {len(each.plans) for each in done[1::2]} == {1}
        assert {each.usage.num_output_tokens for each in done} == {80}

        async def serves_again() -> bool:
            router = process_of(info.run_dir, "router-0")
            return router.address != "" and router.identity != before

        await until(serves_again, timeout_s=60, what="the killed router is back")
        http = AsyncOpenAI(base_url=f"http://{info.http_addresses[0]}/v1", api_key="sk-any", max_retries=20)
        async with AsyncClient(first, timeout_s=60, max_attempts=100) as again, http:
            await answer(again, 0, num_tokens=4)
            workers = {view.worker_id for view in (await again.status()).workers}
            assert workers <= {"prefill-0", "decode-0"}
            options: dict[str, Any] = {"prompt": "Where it was.", "max_tokens": 8, "temperature": 1.0, "seed": 11}
            reply = await http.completions.create(model="fake", **options)
            assert reply.choices[0].text == (await again.generate(**options)).text
        status = (await other.status()).router
        assert status.num_failed == status.num_replans == 0
        held = [view.status.num_leases for view in await reporting_workers(other) if view.status is not None]
        assert held == [0, 0]


async def test_another_user_of_the_machine_is_a_stranger_to_a_cluster_without_tls(info: ClusterInfo) -> None:
    """Everything listens on the loopback address; nothing inside answers without a proof of membership."""
    async with AsyncClient(info.addresses[1], timeout_s=60) as client:
        inside = {int(view.address.rpartition(":")[2]) for view in (await client.status()).workers}
    state = StateFile(info.run_dir).read()
    assert state is not None
    doors = {int(address.rpartition(":")[2]) for address in (*info.addresses, *info.http_addresses)}
    identities = [process.identity for process in state.processes]
    listening = {port for each in identities if each is not None for port in listening_ports(each.pid)}
    assert inside | doors <= listening
    answers = set()
    for port in listening - doors:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            raw: Any = channel.unary_unary("/kvrelay.v1.WorkerService/DescribeWorker")
            answers.add(await raw(b"", timeout=60).code())
    # By a door for direct clients: no such service. By a metrics port: no gRPC.
    assert answers <= {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert grpc.StatusCode.UNAUTHENTICATED in answers


async def test_routers_with_another_policy_lose_no_request_of_clients_that_know_both(info: ClusterInfo) -> None:
    async with client_of(info.run_dir.parent) as client:

        async def short_connections(load: Load) -> None:
            while not load.over.is_set():
                async with client_of(info.run_dir.parent) as fresh:
                    await answer(fresh, 0, num_tokens=LOAD["num_tokens"])
                await asyncio.sleep(LOAD["pause_s"])

        async with asyncio.TaskGroup() as tasks, repeated_streams(client, **LOAD) as load:
            tasks.create_task(short_connections(load))
            router = CONFIG["router"] | {"policy": "least_load"}
            steps = await roll_out(info.run_dir.parent, CONFIG | {"router": router})
        policies = [await policy_of(address) for address in client.addresses]

        assert steps[1:3] == ["replacing router-0", "replacing router-1"]
        assert policies == ["least_load", "least_load"]
        # A router has no cache to warm: its start is no reason to warn of prefixes.
        assert "prefixes did not move" not in (info.run_dir / "logs" / "supervisor.log").read_text(encoding="utf-8")


async def test_another_block_size_fails_no_request_of_clients_that_know_both_routers(info: ClusterInfo) -> None:
    other = CONFIG | {"pools": {pool: FAKE_POOL | {"block_size": 32} for pool in ("prefill", "decode")}}
    async with client_of(info.run_dir.parent) as client:
        old_model = await fingerprint_of(client.address)
        async with repeated_streams(client, **LOAD) as load:
            steps = await roll_out(info.run_dir.parent, other)
            num_answers = load.num_answers
            while load.num_answers < num_answers + NUM_STREAMS:
                await load.next_answer()
        workers = await pids(client)
        models = {await fingerprint_of(address) for address in client.addresses}

        assert [step for step in steps if step.startswith("replacing ")] == [
            "replacing router-0",
            "replacing router-1",
        ]
        assert len(models) == 1 and models != {old_model}
        assert set(workers) == {"prefill-1", "decode-1"}
        assert running_config(info.run_dir.parent).pools.decode.block_size == 32
        await assert_nothing_was_lost(client)
