"""Whole clusters of the real services on the fake engine: launched, hurt, stopped. Nothing may be left."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.lifecycle import ClusterError, ClusterInfo, read_info, up
from common.process import ProcessIdentity
from kvrelay.client import Client
from tests.cluster.support import make_config
from tests.e2e.harness import fake_config, family, members, process_of, standing_cluster

pytestmark = pytest.mark.e2e

_PROMPT = "a prompt that is longer than the threshold for local prefill"


def eventually(condition: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def answer(address: str) -> list[int]:
    with Client(address, timeout_s=60) as client:
        (sample,) = client.generate(_PROMPT, max_tokens=8, temperature=0, ignore_eos=True).samples
        return list(sample.token_ids)


def is_healthy(http_address: str) -> bool:
    with urllib.request.urlopen(f"http://{http_address}/health", timeout=60) as response:
        return bool(response.status == 200)


def kill_every_process(info: ClusterInfo) -> None:
    """Kill the services one by one, each of which comes back; then the supervisor, so that only `down` ends them."""
    run_dir = info.run_dir
    first = answer(info.address)
    assert len(first) == 8
    assert is_healthy(info.http_address)

    for name in ("decode-0", "prefill-0", "router-0"):
        before = process_of(run_dir, name).identity
        assert before is not None
        before.signal(signal.SIGKILL)

        def is_back(name: str = name, before: ProcessIdentity = before) -> bool:
            return process_of(run_dir, name).identity not in (None, before)

        eventually(is_back, what=f"{name} is back")
        assert process_of(run_dir, name).num_restarts == 1

    assert answer(info.address) == first
    assert is_healthy(info.http_address)
    logs = {path.name: path.stat().st_size for path in (run_dir / "logs").glob("*.log")}
    assert logs.pop("fork-server.log", 0) == 0
    assert set(logs) >= {"supervisor.log", "router-0.log", "prefill-0.log", "decode-0.log"}
    assert all(size > 0 for size in logs.values())

    assert info.pid == members(run_dir)[-1].pid
    members(run_dir)[-1].signal(signal.SIGKILL)


def test_every_process_killed_comes_back_and_a_cluster_beside_it_goes_on(tmp_path: Path) -> None:
    for name in ("blue", "green"):
        (tmp_path / name).mkdir()
    with (
        standing_cluster(tmp_path / "blue", fake_config()) as blue,
        standing_cluster(tmp_path / "green", fake_config()) as green,
    ):
        others = members(green.run_dir)
        assert blue.address != green.address
        assert answer(blue.address) == answer(green.address)

        kill_every_process(blue)

        assert len(answer(green.address)) == 8
        assert members(green.run_dir) == others


def test_starter_killed_before_the_cluster_is_ready_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from cluster.lifecycle import up\n"
        "from common.config import parse_config; from tests.e2e.harness import fake_config\n"
        "def report(text):\n"
        "    print(text)\n"
        "    if 'starting router-0' in text: signal.pause()  # so that it never hears that the cluster is ready\n"
        "up(parse_config(fake_config(), source='x'), config_path=Path('x'), run_dir=Path(sys.argv[1]), report=report)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    ) as starter:
        assert starter.stdout is not None
        while b"starting router-0" not in starter.stdout.readline():
            assert starter.poll() is None
        eventually(lambda: bool(members(tmp_path)), what="state.json is there")
        supervisor = members(tmp_path)[-1]
        started = family(supervisor.pid)
        starter.kill()

    eventually(lambda: not supervisor.is_alive(), what="the supervisor ends")
    assert [each for each in started if each.is_alive()] == []
    assert members(tmp_path) == []


def test_up_when_a_service_cannot_start_tells_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    tenants = [{"name": "a", "api_keys": ["env:NO_SUCH_KEY"]}]
    config = make_config(router={"port": 0, "auth": "api_key", "salt_secret": "x" * 32}, tenants=tenants)
    children = set(psutil.Process().children(recursive=True))

    with pytest.raises(ClusterError, match=r"^serving\.yaml:tenants\.0\.api_keys\.0: router-0: .*NO_SUCH_KEY"):
        up(config, config_path=Path("serving.yaml"), run_dir=tmp_path / "run", report=lambda _: None)

    assert set(psutil.Process().children(recursive=True)) <= children
    assert read_info(tmp_path / "run") is None
