"""A certificate is renewed in time, whatever happens to clocks, disks and answers on the way."""

import asyncio
import io
import json
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from cluster.trust import Trust
from common.config import ServingConfig
from common.trust.credentials import Credentials
from common.trust.doors import DoorContext, FileDoor, IssuedDoor
from common.trust.identity import Role
from common.trust.pipe import EnrolmentPipe, answer_to
from tests.security.listeners import authority
from tests.security.test_rotation import renew, shown_by, write_pair


class Clock:
    """A wall clock that goes on while the host is suspended, which a sleep does not notice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, suspended_s: float) -> None:
        self.now_s = time.time()
        self.slept_s = 0.0
        self._suspended_s = suspended_s
        monkeypatch.setattr(time, "time", lambda: self.now_s)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, duration_s: float) -> None:
        self.slept_s += duration_s
        self.now_s += duration_s + self._suspended_s
        self._suspended_s = 0.0


async def test_host_that_was_suspended_over_a_weekend_renews_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Credentials.of(authority(is_encrypted=False, lifetime_s=86_400.0), Role.WORKER, "decode-0")
    clock = Clock(monkeypatch, suspended_s=60 * 3600.0)
    await mine.until_renewal()
    assert clock.slept_s <= 60


async def test_certificate_is_renewed_at_two_thirds_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Credentials.of(authority(is_encrypted=False, lifetime_s=86_400.0), Role.WORKER, "decode-0")
    clock = Clock(monkeypatch, suspended_s=0)
    await mine.until_renewal()
    assert clock.slept_s == pytest.approx(86_400 * 2 / 3, abs=2)


async def printed(capsys: pytest.CaptureFixture[str]) -> str:
    for _ in range(1000):
        await asyncio.sleep(0)
        if text := capsys.readouterr().out:
            return text
    raise AssertionError


async def test_answer_that_comes_too_late_does_not_stand_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, mine = authority(is_encrypted=False), Credentials()
    enrol = partial(own.enrol, role=Role.WORKER, name="decode-0")
    late = enrol(Credentials().request(())).to_json() + "\n"
    given: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    pipe = EnrolmentPipe(mine, lambda: ("localhost",))
    monkeypatch.setattr(pipe, "_answers", given)
    given.put_nowait(late)

    async def answer() -> None:
        given.put_nowait(answer_to(await printed(capsys), enrol) or "")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        await pipe._renew()  # noqa: SLF001
    assert mine.identity.name == "decode-0"


async def test_request_names_the_addresses_that_the_host_has_now(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ["10.0.0.1"]
    pipe = EnrolmentPipe(Credentials(), lambda: addresses)
    for address in ("10.0.0.1", "10.0.0.2"):
        addresses[:] = [address]
        renewing = asyncio.create_task(pipe._renew())  # noqa: SLF001
        assert json.loads(json.loads(await printed(capsys))["request"])["hosts"] == [address]
        renewing.cancel()


def test_listener_that_cannot_use_a_certificate_keeps_it_from_no_other() -> None:
    own = authority(is_encrypted=True)
    mine = Credentials.of(own, Role.ROUTER, "router-0")
    told: list[int] = []

    def full() -> None:
        raise OSError(28, "No space left on device")

    mine.on_accept(full)
    mine.on_accept(lambda: told.append(mine.generation))
    with pytest.raises(OSError, match="space"):
        renew(mine, own, Role.ROUTER, "router-0")
    assert told == [mine.generation]


async def test_controller_goes_on_renewing_when_its_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = Trust.open(ServingConfig(), tmp_path, is_spread=True)
    tries = asyncio.Semaphore(0)

    def full() -> None:
        tries.release()
        raise OSError(28, "No space left on device")

    trust.credentials.on_accept(full)
    monkeypatch.setattr("cluster.trust.LOOK_S", 0.0)
    monkeypatch.setattr(Credentials, "renewal_due_s", 0.0)
    async with asyncio.timeout(60), trust.renewing():
        for _ in range(3):
            await tries.acquire()


def test_http_door_takes_up_files_that_the_operator_replaces(tmp_path: Path) -> None:
    own = authority(is_encrypted=True)
    first = write_pair(tmp_path, own)
    context = DoorContext(FileDoor(tmp_path / "door.pem", tmp_path / "door.key"))
    assert shown_by(context.newest()) == first
    key = (tmp_path / "door.key").read_bytes()
    second = write_pair(tmp_path, own)
    new_key = (tmp_path / "door.key").read_bytes()
    (tmp_path / "door.key").write_bytes(key)
    assert shown_by(context.newest()) == first, "half of a pair"
    (tmp_path / "door.key").write_bytes(new_key)
    assert shown_by(context.newest()) == second


def test_http_door_takes_up_a_renewed_certificate() -> None:
    own = authority(is_encrypted=True)
    mine = Credentials.of(own, Role.ROUTER, "router-0")
    context = DoorContext(IssuedDoor(mine))
    newest = renew(mine, own, Role.ROUTER, "router-0")
    assert shown_by(context.newest()) == newest
