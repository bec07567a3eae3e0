"""The router as a process and as an object: start, ready line, health, metrics, drain."""

import asyncio
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import parse_config
from common.rpc import client_channel
from common.trust.identity import Role
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, router_admin_pb2
from router.__main__ import main as router_main
from router.observe.alarms import AlarmKind
from router.reading.codec import ByteCodec, Codec
from router.server import start_router
from tests.router.fake_worker import DECODE, PREFILL, TIMEOUT_S, FakeWorker, answer
from tests.router.fakes import TestCluster, config_with, make_request, prompt_of, running_cluster
from tests.router.http.clients import fetch
from tests.router.processes import router_process
from tests.trust import credentials_of

FAKE = {"model": {"engine": "fake"}, "router": {"metrics_port": 0}}


async def scrape(port: int) -> dict[str, float]:
    """Return every sample of a metrics endpoint, by name with labels."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    body = (await reader.read()).decode()
    writer.close()
    lines = [line for line in body.splitlines() if line.startswith("kvrelay_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


MINE = credentials_of(Role.ROUTER, "router-0")


async def test_start_router_with_the_fake_engine_serves_without_model_files() -> None:
    router = await start_router(parse_config(FAKE, source="test"), MINE, model_dir=None, host="127.0.0.1", port=0)
    channel = client_channel(router.address)
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(text="hé"))
        assert (list(tokenized.token_ids), router.metrics_port > 0) == ([104, 195, 169], True)
    finally:
        await channel.close()
        await router.stop(0)


async def test_start_router_of_a_real_model_without_its_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="folder"):
        await start_router(parse_config({}, source="test"), MINE, model_dir=None, host="127.0.0.1", port=0)


async def test_start_router_on_a_taken_port_raises_and_holds_nothing() -> None:
    config = parse_config(FAKE, source="test")
    router = await start_router(config, MINE, model_dir=None, host="127.0.0.1", port=0)
    try:
        with pytest.raises(OSError, match="cannot listen"):
            await start_router(config, MINE, model_dir=None, host="127.0.0.1", port=int(router.address.split(":")[1]))
    finally:
        await router.stop(0)


async def test_get_demand_reports_arrivals_and_every_worker(cluster: TestCluster) -> None:
    await cluster.generate(make_request())
    report = await cluster.admin.GetDemand(router_admin_pb2.GetDemandRequest(window_s=10))
    assert [(each.worker_id, each.is_serving) for each in report.workers] == [("p0", True), ("d0", True)]
    assert not any(each.HasField("timing") for each in report.workers), "fakes have measured nothing"
    assert all(each.block_size > 0 and each.load.num_blocks > 0 for each in report.workers)
    with pytest.raises(grpc.aio.AioRpcError, match="0 is not from 1 to 120"):
        await cluster.admin.GetDemand(router_admin_pb2.GetDemandRequest(window_s=0))


async def test_stop_lets_running_requests_end_and_takes_no_new_ones() -> None:
    decode = FakeWorker("d0", DECODE)
    decode.gates.close("token 2")
    async with running_cluster(decode) as cluster:
        generating = await cluster.start(make_request(), decode, "token 2")
        stopping = asyncio.create_task(cluster.router.stop(TIMEOUT_S))
        decode.gates.open("token 2")
        assert (await generating).token_ids() == answer(prompt_of(10), 6)
        await stopping


async def test_metrics_show_outcomes_latencies_and_cache_predictions() -> None:
    prefill, decode = FakeWorker("p0", PREFILL, num_cached_tokens=4), FakeWorker("d0", DECODE)
    async with running_cluster(prefill, decode, config=config_with(metrics_port=0)) as cluster:
        await cluster.generate(make_request(10, max_tokens=6))
        await cluster.until_idle()
        samples = await scrape(cluster.router.metrics_port)
    assert samples['kvrelay_requests_total{outcome="completed"}'] == 1
    assert samples["kvrelay_ttft_seconds_count"] == samples["kvrelay_tpot_seconds_count"] == 1
    assert samples["kvrelay_itl_seconds_count"] == 5
    assert samples["kvrelay_prefill_seconds_sum"] == 0.25
    assert samples["kvrelay_transfer_seconds_sum"] == 0.5
    assert samples["kvrelay_predicted_cached_tokens_total"] == 0
    assert samples["kvrelay_actual_cached_tokens_total"] == 4
    assert samples["kvrelay_requests_queued"] == samples["kvrelay_requests_active"] == 0
    assert samples["kvrelay_workers_ready"] == 2
    assert [samples[f'kvrelay_routing_alarm{{kind="{kind.value}"}}'] for kind in AlarmKind] == [0] * len(AlarmKind)


async def test_byte_codec_is_a_codec_and_takes_any_text() -> None:
    codec: Codec = ByteCodec()
    assert bytes((codec.encode_now("a\0ü")).tolist()) == "a\0ü".encode()
    assert codec.decode([104, 195, 169, 256]) == "h\u00e9"
    assert codec.decode_pieces([65, 255, 256]) == ("A", "\ufffd", "")


def test_router_process_with_a_bad_config_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serving.yaml"
    config.write_text("router: {colour: red}\n")
    monkeypatch.setattr(sys, "argv", ["router", "--config", str(config)])
    monkeypatch.setattr("router.__main__.setup_logging", lambda _name: None)  # this process has its own
    with pytest.raises(SystemExit) as caught:
        router_main()
    assert caught.value.code == 2
    assert "router.colour: unknown key" in capsys.readouterr().err


# More silent connections than a router may have open files.

MAX_OPEN_FILES = 256
NUM_SILENT = 300
RECOVERY_S = 60.0
"""The gRPC door answers again when the first silent connections have had their time."""


# Not a `preexec_fn`: a fork of this process, with gRPC's threads, may die before it has become the router.
FEW_OPEN_FILES = ("sh", "-c", f'ulimit -S -n {MAX_OPEN_FILES // 2}; ulimit -H -n {MAX_OPEN_FILES}; exec "$@"', "sh")


async def http_port_of(address: str) -> int:
    async with client_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=RECOVERY_S, wait_for_ready=True
        )
        return int((await call).router.http_port)


async def test_router_process_serves_beside_silent_connections_and_stops_on_a_signal(tmp_path: Path) -> None:
    async with router_process(tmp_path, wrapper=FEW_OPEN_FILES) as (process, ready):
        assert ready.pid == process.pid
        assert ready.metrics_port > 0
        async with asyncio.timeout(TIMEOUT_S), client_channel(ready.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        host, _, port = ready.address.rpartition(":")
        http_port = await http_port_of(ready.address)
        with ExitStack() as silent:
            for at in (http_port, int(port)):
                for _ in range(NUM_SILENT):
                    silent.enter_context(await asyncio.to_thread(socket.create_connection, (host, at), TIMEOUT_S))
            async with asyncio.timeout(TIMEOUT_S):
                assert (await fetch(http_port, "GET", "/version"))[0] == 200
            assert await http_port_of(ready.address) == http_port
            async with asyncio.timeout(TIMEOUT_S):
                assert (await fetch(http_port, "GET", "/version"))[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            assert (await process.stdout.read(), await process.wait()) == (b"", 0)
