"""up, down and read_info, without services: state handling, ports, models."""

import asyncio
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import stopping, wiring
from cluster.lifecycle import RUN_DIR_ENV, ClusterError, default_run_dir, down, read_info, up
from cluster.processes.run_dir import lock_run_dir
from cluster.processes.starter import Event, StartFailure
from cluster.processes.state import StateFile
from cluster.ray import outside
from cluster.resolving import with_model
from common.config import ServingConfig, TracingConfig
from common.model_files import CACHE_ENV, NoHome
from common.process import ProcessIdentity
from tests.cluster.support import make_config
from tests.cluster.test_state import make_state

_DEAD = ProcessIdentity(pid=os.getpid(), birth="another-boot:1")


def ignore(text: str) -> None:
    """Drop a report."""


def start(config: ServingConfig, run_dir: Path) -> None:
    up(config, config_path=Path("serving.yaml"), run_dir=run_dir, report=ignore)


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """Run a process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        try:
            yield process, identity
        finally:
            process.kill()


@pytest.mark.parametrize("supervisor", [None, _DEAD], ids=["empty folder", "reused pid"])
def test_read_info_without_a_live_supervisor_is_none(tmp_path: Path, supervisor: ProcessIdentity | None) -> None:
    if supervisor is not None:
        StateFile(tmp_path).write(make_state(supervisor=supervisor))

    assert read_info(tmp_path) is None


def test_read_info_of_a_live_supervisor_has_address_and_pid(tmp_path: Path) -> None:
    with sleeper() as (process, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        info = read_info(tmp_path)

    assert info is not None
    assert (info.address, info.pid, info.run_dir) == ("127.0.0.1:50051", process.pid, tmp_path)


def test_down_of_nothing_is_false(tmp_path: Path) -> None:
    assert down(tmp_path, report=ignore) is False


def test_down_when_the_supervisor_was_killed_kills_what_it_left_and_no_stranger(tmp_path: Path) -> None:
    with sleeper() as (_, orphan_identity), sleeper() as (stranger, _):
        reused = ProcessIdentity(pid=stranger.pid, birth="another-boot:1")
        StateFile(tmp_path).write(make_state(supervisor=_DEAD, members=(orphan_identity, reused)))

        assert down(tmp_path, report=ignore) is True

        assert not orphan_identity.is_alive()
        assert stranger.poll() is None
    assert StateFile(tmp_path).read() is None


def test_down_stops_the_supervisor_without_having_to_kill_it(tmp_path: Path) -> None:
    with sleeper() as (_, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))
        reports: list[str] = []

        assert down(tmp_path, report=reports.append) is True

        assert not identity.is_alive()
    assert reports == ["stopping the cluster on 127.0.0.1:50051: the router drains first", "stopped"]


# A cluster in a joined Ray.


def in_ray(run_dir: Path, *, supervisor: ProcessIdentity, members: tuple[ProcessIdentity, ...] = ()) -> None:
    """Write the state of a cluster whose prefill-0 runs on another host."""
    state = make_state(supervisor=supervisor, members=members)
    elsewhere = replace(make_state(supervisor=supervisor, members=(supervisor,)).processes[0], identity=None)
    processes = (*state.processes, replace(elsewhere, name="prefill-0"))
    environment = {"RAY_ADDRESS": "192.0.2.1:6379"}
    StateFile(run_dir).write(replace(state, processes=processes, ray_environment=environment, helpers=()))


@pytest.fixture
def ray_is_silent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Asking Ray fails; returns what was asked."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-2:])
        if len(asked) == 1:
            raise subprocess.TimeoutExpired(command, 25.0)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="…\nGCS does not answer\n")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(outside, "_PAUSE_S", 0.0)
    monkeypatch.setattr("cluster.ray.outside.subprocess.run", run)
    return asked


def test_down_while_ray_is_silent_retries_and_names_what_may_still_run(
    tmp_path: Path, ray_is_silent: list[list[str]]
) -> None:
    with sleeper() as (_, router):
        in_ray(tmp_path, supervisor=_DEAD, members=(router,))
        reports: list[str] = []

        with pytest.raises(ClusterError) as caught:
            down(tmp_path, report=reports.append)
        assert not router.is_alive()

    assert str(caught.value) == (
        "Ray at 192.0.2.1:6379 failed: GCS does not answer. 1 processes of this host were killed;"
        " prefill-0 may still run on other hosts."
        " Repeat `kvrelay down` when Ray answers, or run `ray stop` on every host"
    )
    assert reports[0] == "Ray at 192.0.2.1:6379 does not answer within 25 s; asking again in 0 s"
    assert ray_is_silent == [["remove", "kvrelay"]] * 3


def test_controller_that_ray_starts_after_such_a_down_ends_the_rest(
    tmp_path: Path, ray_is_silent: list[list[str]]
) -> None:
    in_ray(tmp_path, supervisor=_DEAD)
    with pytest.raises(ClusterError):
        down(tmp_path, report=ignore)

    state = StateFile(tmp_path).read()
    assert state is not None and state.phase.is_end


def test_down_with_a_controller_that_hangs_goes_to_ray_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeper() as (process, identity):
        in_ray(tmp_path, supervisor=identity)
        reports: list[str] = []

        def remove(cluster: str, environment: object, *, report: object) -> list[str]:
            process.kill()
            return ["controller", "prefill-0"]

        monkeypatch.setattr(outside, "remove_actors", remove)
        assert down(tmp_path, report=reports.append) is True

    assert reports[1].startswith("the controller does not answer: ")
    assert reports[3:] == ["removed controller, prefill-0 from Ray", "stopped"]
    assert StateFile(tmp_path).read() is None


def test_up_while_ray_is_silent_does_not_take_an_earlier_cluster_for_gone(
    tmp_path: Path, ray_is_silent: list[list[str]]
) -> None:
    in_ray(tmp_path, supervisor=_DEAD)
    with pytest.raises(ClusterError, match=r"processes of the last `kvrelay up` may still run there.*state\.json"):
        start(make_config(launcher="ray"), tmp_path)

    assert ray_is_silent == [["find", "kvrelay"]] * 3


# Without a state.


def test_down_finds_the_supervisor_of_a_run_folder_that_has_vanished(tmp_path: Path) -> None:
    run_dir = tmp_path / "gone"
    code = "import signal; print(flush=True); signal.pause()"
    # As `python -m cluster.owner` looks in the process table; Python passes everything after -c on.
    command = [sys.executable, "-c", code, "-m", "cluster.owner", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, sleeper() as (stranger, _):
        assert process.stdout is not None
        process.stdout.readline()
        reports: list[str] = []

        assert down(run_dir, report=reports.append) is True

        assert process.wait() == -signal.SIGTERM
        assert stranger.poll() is None
    assert reports == [f"{run_dir} has no state.json, but its supervisor ({process.pid}) runs: stopping it", "stopped"]


def test_down_of_a_locked_folder_without_a_state_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(stopping, "_DEATH_TIMEOUT_S", 0.1)
    with lock_run_dir(tmp_path), pytest.raises(ClusterError, match=r"a supervisor holds its lock.*RAY_ADDRESS"):
        down(tmp_path, report=ignore)


def test_up_where_a_cluster_runs_names_its_address(tmp_path: Path) -> None:
    with sleeper() as (_, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        with pytest.raises(ClusterError, match=r"already runs.*127\.0\.0\.1:50051"):
            start(make_config(), tmp_path)


@pytest.mark.parametrize("key", ["port", "http_port"])
def test_up_when_a_port_is_taken_names_file_key_and_port(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ClusterError, match=rf"serving\.yaml:router\.{key}: 127\.0\.0\.1:{port} is taken"):
            start(make_config(router={"port": 0, key: port}), tmp_path)


def test_up_when_the_host_is_not_ours_names_file_and_key(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"serving\.yaml:router\.host: cannot listen on 192\.0\.2\.77"):
        start(make_config(router={"host": "192.0.2.77", "port": 0}), tmp_path)


def test_up_when_the_model_is_missing_says_so_before_anything_starts(tmp_path: Path) -> None:
    config = make_config(model={"id": str(tmp_path / "no-such-model")})

    with pytest.raises(ClusterError, match="no-such-model"):
        start(config, tmp_path / "run")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "num_ranks", "reason"),
    [
        ({}, 3, "cannot cut this model among 3 ranks: its 4 heads, 2 key heads and inner sizes allow 1, 2"),
        ({"quantization": "int8"}, 2, "cannot cut quantized weights"),
        ({"id": "foreign"}, 2, "cannot cut what transformers computes"),
        ({}, 2, ""),
        ({"engine": "vllm"}, 3, ""),
    ],
)
def test_number_of_ranks_that_the_model_forbids_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, str], num_ranks: int, reason: str
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr("cluster.lifecycle.start_supervisor", lambda _dir, _report: StartFailure(reason="started"))
    if model.get("id") == "foreign":
        (tmp_path / "config.json").write_text('{"architectures": ["OlmoForCausalLM"]}')
        model = {"id": str(tmp_path)}
    config = make_config(
        launcher="local",
        model={"engine": "torch", "id": "random:tiny", "device": "cpu"} | model,
        pools={"decode": {"tensor_parallel": num_ranks}},
        router={"port": 0},
    )

    with pytest.raises(ClusterError) as caught:
        start(config, tmp_path / "run")

    expected = f"serving.yaml:pools.decode.tensor_parallel: {reason}" if reason else "started"
    assert str(caught.value).startswith(expected)
    assert (tmp_path / "run").exists() == (not reason)


def test_up_without_a_compiler_says_what_would_make_it_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "cluster.lifecycle.start_supervisor", lambda _dir, _report: StartFailure(reason="no supervisor")
    )
    config = make_config(launcher="local", model={"id": "random:tiny", "device": "cpu"}, router={"port": 0})
    reports: list[str] = []

    with pytest.raises(ClusterError, match="no supervisor"):
        up(config, config_path=Path("serving.yaml"), run_dir=tmp_path / "run", report=reports.append)

    assert reports == ["no C++ compiler on this host; install g++: torch alone is several times slower"]


def test_up_with_doors_that_other_hosts_reach_without_a_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lifecycle.start_supervisor", lambda _dir, _report: StartFailure(reason="none"))
    tenants = [{"name": "a", "api_keys": ["k" * 16]}]
    for host, auth in (("127.0.0.1", {}), ("0.0.0.0", {"auth": "api_key"}), ("0.0.0.0", {})):
        reports: list[str] = []
        config = make_config(
            launcher="local", router={"port": 0, "host": host, **auth}, tenants=tenants if auth else []
        )
        with pytest.raises(ClusterError, match="none"):
            up(config, config_path=Path("serving.yaml"), run_dir=tmp_path / "run", report=reports.append)
        warned = [report for report in reports if "set router.auth: api_key and tenants" in report]
        assert len(warned) == (host == "0.0.0.0" and not auth)


def test_up_says_which_recommended_values_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.0, "top_k": -1}')
    reports: list[str] = []
    for wanted in (True, False):
        model = {"id": str(tmp_path), "device": "cpu", "generation_config": wanted}
        with_model(make_config(launcher="local", model=model), Path("serving.yaml"), reports.append)
    assert [report.partition(" is 0.0")[0] for report in reports] == [
        f"generation_config.json of {tmp_path.name}: top_p"
    ]


def test_default_run_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_RUN_DIR", str(tmp_path))
    assert default_run_dir("blue") == tmp_path / "blue"

    monkeypatch.delenv("KVRELAY_RUN_DIR")
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    assert default_run_dir("blue") == tmp_path / "cache" / "run" / "blue"


def test_up_beside_a_supervisor_that_has_just_started_says_so_and_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.lifecycle.read_info", lambda _run_dir: None)
    with sleeper() as (process, identity):
        StateFile(tmp_path).write(make_state(supervisor=identity))

        with pytest.raises(ClusterError, match=f"a supervisor \\({process.pid}\\) is alive"):
            start(make_config(), tmp_path)
        assert process.poll() is None


async def test_cluster_that_could_not_trace_as_told_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    events: list[Event] = []
    listener = SimpleNamespace(notify=events.append)
    config = make_config(launcher="local").model_copy(update={"tracing": TracingConfig(endpoint="http://127.0.0.1:1")})
    status = await wiring.supervise(config, run_dir=tmp_path, listener=listener, stopping=asyncio.Event())

    assert status == 1
    (failure,) = events
    assert isinstance(failure, StartFailure)
    assert failure.key == "tracing.endpoint"
    assert failure.reason.startswith("cannot trace: opentelemetry")
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize(("configured", "variable"), [("", CACHE_ENV), ("runs", RUN_DIR_ENV)])
def test_up_without_a_folder_that_can_be_written_names_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str, variable: str
) -> None:
    (tmp_path / "runs").write_text("a file where the folder would be")
    monkeypatch.delenv(RUN_DIR_ENV, raising=False)
    if configured:
        monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path / configured))
    with pytest.raises(ClusterError, match=f"cannot use .*runs/mine: Not a directory; set {variable} to a folder"):
        start(make_config(router={"port": 0}), tmp_path / "runs" / "mine")


@pytest.mark.parametrize("variables", [{}, {CACHE_ENV: "~/cache"}, {RUN_DIR_ENV: "~nobody-has-this-name/runs"}])
def test_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("HOME", CACHE_ENV, RUN_DIR_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoHome, match=f"no home folder; set HOME or {CACHE_ENV}"):
        default_run_dir("mine")
