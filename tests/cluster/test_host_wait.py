"""A Ray actor for which no host comes: the limit of the wait, and a message that says what was missing."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

ray = pytest.importorskip("ray")

from ray.exceptions import RaySystemError  # noqa: E402

from cluster.processes.launcher import StartFailed  # noqa: E402 - after the skip
from cluster.processes.plan import ProcessRole, ProcessSpec  # noqa: E402
from cluster.ray.launch_ray import RayLauncher, serving  # noqa: E402
from cluster.ray.private_ray import RayHome  # noqa: E402
from common.config import ServingConfig  # noqa: E402
from common.process import ProcessIdentity, Ready  # noqa: E402
from tests.cluster.support import make_config  # noqa: E402
from tests.trust import AUTHORITY, CONTROLLER  # noqa: E402

READY = Ready(address="a:1", admin_address="a:1", metrics_port=0, pid=7)


class Method:
    """Stands for a method of Ray's handle: answers once its event is set."""

    def __init__(self, answer: object, may_answer: asyncio.Event) -> None:
        self._answer, self._may_answer = answer, may_answer

    async def remote(self) -> object:
        await self._may_answer.wait()
        return self._answer


class Actor:
    """Stands for Ray's handle of an actor: one without a host never answers."""

    def __init__(self) -> None:
        self.has_host, self.has_loaded = asyncio.Event(), asyncio.Event()
        self.request_certificate = Method(None, self.has_host)
        self.ready = Method(READY, self.has_loaded)
        self.identity = Method(ProcessIdentity(pid=7, birth="b:1"), self.has_host)


class Home(RayHome):
    """Hosts with a label."""

    description = "of a test"
    free: tuple[dict[str, float], ...] = ()

    def free_on(self, spec: ProcessSpec) -> list[Mapping[str, float]]:
        return list(self.free)

    def hosts_of(self, spec: ProcessSpec) -> str:
        return "host with the label pool=decode"


def worker(**keys: Any) -> ProcessSpec:
    return ProcessSpec(name="decode-3", role=ProcessRole.DECODE, host=None, port=0, **keys)


def launcher_in(folder: Path) -> RayLauncher:
    config = make_config(launcher="ray", host_wait_s=0.01)
    credentials = cast("Any", CONTROLLER)
    return RayLauncher(config, run_dir=folder, home=Home(), authority=AUTHORITY, credentials=credentials)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            {"num_cpus": 4},
            "decode-3: no host with the label pool=decode had 4 free CPUs within 0.01 s;"
            " add a host, lower pools.decode.num_cpus or raise host_wait_s",
        ),
        (
            {"num_cpus": 8, "num_gpus": 0.5},
            "decode-3: no host with the label pool=decode had 8 free CPUs and 0.5 free GPU within 0.01 s;"
            " add a host, lower pools.decode.num_cpus or pools.decode.num_gpus or raise host_wait_s",
        ),
        (
            {},
            "decode-3: no host with the label pool=decode had room within 0.01 s; add a host or raise host_wait_s",
        ),
    ],
)
async def test_worker_without_a_host_is_given_up_with_what_was_missing(
    resources: dict[str, float], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    actor = Actor()
    monkeypatch.setattr(RayLauncher, "_create", lambda self, spec: actor)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    launcher = launcher_in(tmp_path)

    with pytest.raises(StartFailed) as caught:
        await launcher.start(worker(**resources))

    assert str(caught.value) == message
    assert killed == [actor]


@pytest.mark.parametrize(
    ("free", "missing"),
    [
        ((), "4 free CPUs and 1 free GPU on a host with the label pool=decode; there is none"),
        (
            ({"CPU": 9.0}, {"CPU": 1.0, "GPU": 2.0}),
            "4 free CPUs and 1 free GPU on a host with the label pool=decode; the best of 2 has 1 CPU and 2 GPUs",
        ),
    ],
)
async def test_worker_without_a_host_tells_what_it_needs_and_what_is_free(
    free: tuple[dict[str, float], ...], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Home, "free", free)
    monkeypatch.setattr(RayLauncher, "_create", lambda self, spec: Actor())
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    launcher, spec = launcher_in(tmp_path), worker(num_cpus=4, num_gpus=1)
    starting = asyncio.create_task(launcher.start(spec))
    await asyncio.sleep(0)

    assert launcher.missing_room_of(spec) == missing
    with pytest.raises(StartFailed):
        await starting
    assert not launcher.missing_room_of(spec)


async def test_ray_that_fails_while_a_worker_is_taken_over_does_not_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []

    async def fail(*_args: object, **_options: object) -> None:
        raise RaySystemError("GCS does not answer")  # type: ignore[no-untyped-call]

    monkeypatch.setattr(RayLauncher, "_create", lambda self, spec: Actor())
    monkeypatch.setattr("cluster.ray.launch_ray.serving", fail)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))

    with pytest.raises(RaySystemError):
        await launcher_in(tmp_path).start(worker())

    assert not killed


async def test_worker_that_loads_its_model_for_long_is_not_given_up() -> None:
    actor = Actor()
    actor.has_host.set()

    async def enrol() -> None:
        """Find a host at once: this does not give up control."""

    starting = asyncio.create_task(serving(actor, enrol, host_wait_s=0.0))
    for _ in range(10):
        await asyncio.sleep(0)
    actor.has_loaded.set()
    assert (await starting)[0] == READY


def test_wait_for_hosts_has_a_limit_by_default() -> None:
    assert 60 <= ServingConfig().host_wait_s <= 3600
