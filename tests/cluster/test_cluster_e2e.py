"""Whole clusters of the real services on the fake engine: launched, hurt, stopped. Nothing may be left."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.lifecycle import ClusterError, ClusterInfo, down, read_info, up
from cluster.processes.state import ClusterState, ProcessState, StateFile
from common.config import ServingConfig
from common.process import ProcessIdentity
from kvrelay.client import Client
from tests.cluster.support import make_config

pytestmark = pytest.mark.e2e

_POOL = {"num_blocks": 64}
_PROMPT = "a prompt that is longer than the threshold for local prefill"


def make_fake_config(launcher: str, **sections: object) -> ServingConfig:
    pools = {"prefill": _POOL, "decode": _POOL}
    return make_config(launcher=launcher, pools=pools, router={"port": 0}, **sections)


@contextmanager
def running(run_dir: Path, launcher: str) -> Iterator[ClusterInfo]:
    """Run a cluster; afterwards everything that belonged to it must be gone."""
    info = up(make_fake_config(launcher), config_path=Path("serving.yaml"), run_dir=run_dir, report=lambda _: None)
    try:
        yield info
    finally:
        members = [*below(info.pid), *identities(run_dir)]
        down(run_dir, report=lambda _: None)
        assert [each for each in members if each.is_alive()] == []
        assert read_info(run_dir) is None


def below(pid: int) -> list[ProcessIdentity]:
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
    return [identity for identity in map(ProcessIdentity.of, family) if identity is not None]


def read_state(run_dir: Path) -> ClusterState:
    state = StateFile(run_dir).read()
    assert state is not None
    return state


def identities(run_dir: Path) -> list[ProcessIdentity]:
    state = StateFile(run_dir).read()
    if state is None:
        return []
    own = [process.identity for process in state.processes if process.identity is not None]
    return [*own, *state.helpers, state.supervisor]


def process(run_dir: Path, name: str) -> ProcessState:
    return next(each for each in read_state(run_dir).processes if each.name == name)


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


def kill_every_process(info: ClusterInfo, run_dir: Path) -> None:
    """Kill the services one by one, each of which comes back; then the supervisor, so that only `down` ends them."""
    first = answer(info.address)
    assert len(first) == 8
    assert is_healthy(info.http_address)

    for name in ("decode-0", "prefill-0", "router-0"):
        before = process(run_dir, name).identity
        assert before is not None
        before.signal(signal.SIGKILL)

        def is_back(name: str = name, before: ProcessIdentity = before) -> bool:
            return process(run_dir, name).identity not in (None, before)

        eventually(is_back, what=f"{name} is back")
        assert process(run_dir, name).num_restarts == 1

    assert answer(info.address) == first
    assert is_healthy(info.http_address)
    logs = {path.name: path.stat().st_size for path in (run_dir / "logs").glob("*.log")}
    assert logs.pop("fork-server.log", 0) == 0
    assert set(logs) >= {"supervisor.log", "router-0.log", "prefill-0.log", "decode-0.log"}
    assert all(size > 0 for size in logs.values())

    members = identities(run_dir)
    read_state(run_dir).supervisor.signal(signal.SIGKILL)

    down(run_dir, report=lambda _: None)

    assert [each for each in members if each.is_alive()] == []
    assert StateFile(run_dir).read() is None


def test_every_process_killed_comes_back_and_a_cluster_beside_it_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "blue", "local") as blue, running(tmp_path / "green", "local") as green:
        members = identities(tmp_path / "green")
        assert blue.address != green.address
        assert answer(blue.address) == answer(green.address)

        kill_every_process(blue, tmp_path / "blue")

        assert len(answer(green.address)) == 8
        assert identities(tmp_path / "green") == members


def test_starter_killed_before_the_cluster_is_ready_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from cluster.lifecycle import up\n"
        "from tests.cluster.test_cluster_e2e import make_fake_config\n"
        "def report(text):\n"
        "    print(text)\n"
        "    if 'starting router-0' in text: signal.pause()  # so that it never hears that the cluster is ready\n"
        "up(make_fake_config('local'), config_path=Path('x'), run_dir=Path(sys.argv[1]), report=report)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    ) as starter:
        assert starter.stdout is not None
        while b"starting router-0" not in starter.stdout.readline():
            assert starter.poll() is None
        eventually(lambda: bool(identities(tmp_path)), what="state.json is there")
        supervisor = read_state(tmp_path).supervisor
        members = below(supervisor.pid)
        starter.kill()

    eventually(lambda: not supervisor.is_alive(), what="the supervisor ends")
    assert [each for each in members if each.is_alive()] == []
    assert StateFile(tmp_path).read() is None


def test_up_when_a_service_cannot_start_tells_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    tenants = [{"name": "a", "api_keys": ["env:NO_SUCH_KEY"]}]
    config = make_config(router={"port": 0, "auth": "api_key", "salt_secret": "x" * 32}, tenants=tenants)
    children = set(psutil.Process().children(recursive=True))

    with pytest.raises(ClusterError, match=r"^serving\.yaml:tenants\.0\.api_keys\.0: router-0: .*NO_SUCH_KEY"):
        up(config, config_path=Path("serving.yaml"), run_dir=tmp_path / "run", report=lambda _: None)

    assert set(psutil.Process().children(recursive=True)) <= children
    assert read_info(tmp_path / "run") is None
