"""The local launcher, over processes that only follow the protocol."""

import asyncio
import os
import signal
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.processes.launch_local import LocalLauncher, service_command
from cluster.processes.launcher import StartFailed
from cluster.processes.plan import ProcessRole
from cluster.processes.run_dir import log_path, make_run_dir, write_config
from common.config import ServingConfig, load_config, parse_config
from common.process import process_birth
from tests.cluster.support import fake_command, make_spec
from tests.trust import AUTHORITY


def make_launcher(run_dir: Path, **modes: Sequence[str]) -> LocalLauncher:
    by_name = {name.replace("_", "-"): mode for name, mode in modes.items()}
    return LocalLauncher(command=fake_command(modes=by_name), run_dir=run_dir, authority=AUTHORITY)


async def test_start_returns_what_the_ready_line_says(tmp_path: Path) -> None:
    process = await make_launcher(tmp_path).start(make_spec("decode-0"))

    assert process.ready.address == "decode-0.invalid:1"
    assert process.identity is not None
    assert process.identity.pid == process.ready.pid
    await process.stop(10)


async def test_stderr_of_every_life_is_appended_to_the_log(tmp_path: Path) -> None:
    launcher = make_launcher(tmp_path)
    for _ in range(2):
        await (await launcher.start(make_spec("decode-0"))).stop(10)

    assert log_path(tmp_path, "decode-0").read_text() == "hello from the log\n" * 2


async def test_failed_start_reports_exit_code_and_log_tail(tmp_path: Path) -> None:
    log_path(tmp_path, "decode-0").parent.mkdir(parents=True)
    log_path(tmp_path, "decode-0").write_text("an older life\n")

    with pytest.raises(StartFailed) as failure:
        await make_launcher(tmp_path, decode_0=["--fail", "port is taken"]).start(make_spec("decode-0"))

    assert str(failure.value) == "decode-0: exited with code 3 before it was ready\nhello from the log\nport is taken"


async def test_start_that_the_process_explains_is_one_line_and_its_key(tmp_path: Path) -> None:
    with pytest.raises(StartFailed) as failure:
        await make_launcher(tmp_path, decode_0=["--explain", "there is no GPU"]).start(make_spec("decode-0"))

    assert str(failure.value) == "decode-0: there is no GPU"
    assert failure.value.key == "model.device"


async def test_end_before_the_certificate_was_read_is_a_failed_start(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="killed by SIGKILL before it was ready"):
        await make_launcher(tmp_path, decode_0=["--die-before-the-answer"]).start(make_spec("decode-0"))


async def test_failed_start_is_told_at_once_although_a_child_holds_stdin(tmp_path: Path) -> None:
    async with asyncio.timeout(40):
        with pytest.raises(StartFailed, match="exited with code 3"):
            await make_launcher(tmp_path, decode_0=["--fail-with-child"]).start(make_spec("decode-0"))


async def test_start_that_the_system_refuses_says_so(tmp_path: Path) -> None:
    launcher = LocalLauncher(command=lambda _spec: ["/no/such/python"], run_dir=tmp_path, authority=AUTHORITY)
    with pytest.raises(StartFailed, match=r"decode-0: cannot start a process: .*No such file"):
        await launcher.start(make_spec("decode-0"))


async def test_start_cancelled_leaves_no_process(tmp_path: Path) -> None:
    launcher, before = make_launcher(tmp_path, decode_0=["--never-ready"]), set(psutil.Process().children())
    task = asyncio.create_task(launcher.start(make_spec("decode-0")))
    while not (children := set(psutil.Process().children()) - before):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not any(child.is_running() for child in children)


async def test_exited_names_the_signal(tmp_path: Path) -> None:
    process = await make_launcher(tmp_path).start(make_spec("decode-0"))
    os.kill(process.ready.pid, signal.SIGKILL)

    async with asyncio.timeout(60):
        assert await process.exited() == "killed by SIGKILL"
    await process.stop(0)


async def test_death_is_told_at_once_although_a_child_outlives_the_process(tmp_path: Path) -> None:
    process = await make_launcher(tmp_path, decode_0=["--with-child"]).start(make_spec("decode-0"))
    (child,) = psutil.Process(process.ready.pid).children()
    telling = asyncio.create_task(process.exited())
    await asyncio.sleep(0)  # it waits before the process dies
    os.kill(process.ready.pid, signal.SIGKILL)

    try:
        async with asyncio.timeout(60):
            assert await telling == "killed by SIGKILL"
            assert child.is_running()
    finally:
        child.kill()
    await asyncio.to_thread(child.wait)
    await process.stop(0)
    for _ in range(5):  # the pipes, which the child held, end
        await asyncio.sleep(0)


async def test_stop_of_a_process_that_ignores_sigterm_kills_it(tmp_path: Path) -> None:
    process = await make_launcher(tmp_path, decode_0=["--ignore-sigterm"]).start(make_spec("decode-0"))

    async with asyncio.timeout(60):
        await process.stop(0.05)

    assert process_birth(process.ready.pid) is None


def test_service_command_names_the_worker_and_asks_it_to_die_with_us(tmp_path: Path) -> None:
    path = tmp_path / "serving.yaml"
    write_config(path, ServingConfig())
    command = service_command(path)

    worker = " ".join(command(make_spec("prefill-0", ProcessRole.PREFILL)))
    router = " ".join(command(make_spec("router-1", ProcessRole.ROUTER)))

    where = "--host 127.0.0.1 --port 0 --die-with-parent"
    (own,) = tmp_path.glob("serving-*.yaml")
    assert worker.endswith(f"-m cluster.worker_process --config {own} --role prefill --worker-id prefill-0 {where}")
    assert router.endswith(f"-m router --config {path} --index 1 {where}")


@pytest.mark.parametrize("has_own", [True, False])
def test_worker_is_given_no_key_and_no_secret_of_the_routers(tmp_path: Path, has_own: bool) -> None:
    path = tmp_path / "run" / "serving.yaml"
    config = parse_config(
        {
            "model": {"engine": "fake"},
            "router": {"auth": "api_key", "salt_secret": "the salt of this cluster"},
            "tenants": [{"name": "a", "api_keys": ["key-of-tenant-a-0001", "env:KEY_OF_A"]}],
        },
        source="test",
    )
    make_run_dir(path.parent)
    write_config(path, config)
    spec = replace(make_spec("decode-0"), config=config if has_own else None)

    command = list(service_command(path)(spec))

    own = Path(command[command.index("--config") + 1])
    assert own != path
    told = load_config(own)
    assert (told.tenants, told.router.salt_secret) == ((), None)
    assert (told.model, told.pools) == (config.model, config.pools)
    assert not any(secret in own.read_text() for secret in ("key-of", "KEY_OF", "the salt"))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, own, path.parent)] == [0o600, 0o600, 0o700]
    router = service_command(path)(replace(make_spec("router-0", ProcessRole.ROUTER), config=spec.config))
    assert load_config(Path(router[list(router).index("--config") + 1])) == config
