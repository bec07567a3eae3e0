"""An actor gets its certificates even if it dies during its enrolment, or takes long to start."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from cluster.ray.launch_ray import ActorEnrolment
from common.config import ServingConfig
from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.identity import Role

_PARAMS = ServiceParams(
    name="decode-0", config=ServingConfig(), host="127.0.0.1", port=0, env={}, role="decode", log_path=None
)
_LIFETIME_S = 86_400.0


class Service(ServiceActor):
    """Reports its identity instead of serving."""

    def __init__(self, params: ServiceParams) -> None:
        super().__init__(params)
        self.enrolled_as: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def node_address(self) -> str:
        return "127.0.0.1"

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        self.enrolled_as.set_result(credentials.identity.name)
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")


class _Method:
    def __init__(self, handle: "Handle", name: str) -> None:
        self._handle, self._name = handle, name

    async def remote(self, *arguments: Any) -> Any:
        return await self._handle.call(self._name, *arguments)


class Handle:
    """Stands for Ray's handle of an actor that dies `num_deaths` times between a request and its answer."""

    def __init__(self, *, num_deaths: int) -> None:
        self._num_deaths = num_deaths
        self.service = Service(_PARAMS)
        self.num_lives = 1
        self.num_certificates = 0

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    async def call(self, name: str, *arguments: Any) -> Any:
        if name == "accept_certificate" and self.num_lives <= self._num_deaths:
            await self.service.stop(0)
            self.service = Service(_PARAMS)
            self.num_lives += 1
        self.num_certificates += name == "accept_certificate"
        return await getattr(self.service, name)(*arguments)


def enrolment_of(handle: Handle) -> ActorEnrolment:
    authority = Authority.new(AuthoritySettings(cluster="test", is_encrypted=True, lifetime_s=_LIFETIME_S))
    return ActorEnrolment(handle, authority, role=Role.WORKER, name="decode-0")


async def test_actor_that_dies_during_enrolment_is_enrolled_in_its_next_life() -> None:
    handle = Handle(num_deaths=2)
    enrolment = enrolment_of(handle)

    await enrolment.enrol()

    assert handle.num_lives == 3
    assert await handle.service.enrolled_as == "decode-0"
    enrolment.close()
    await handle.service.stop(0)


async def test_actor_that_never_takes_a_certificate_is_an_error() -> None:
    handle = Handle(num_deaths=1000)

    with pytest.raises(ValueError, match="cannot enrol decode-0"):
        await enrolment_of(handle).enrol()
    await handle.service.stop(0)


async def test_certificate_is_renewed_while_the_actor_is_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    due: asyncio.Queue[float] = asyncio.Queue(maxsize=2)
    monkeypatch.setattr("cluster.ray.launch_ray.sleep_while", lambda left_s: due.put(left_s()))
    handle = Handle(num_deaths=0)
    # An actor that imports answers an hour after it has taken its certificate.
    monkeypatch.setattr("common.trust.proofs.time", SimpleNamespace(time=lambda: 3600.0 * handle.num_certificates))
    enrolment = enrolment_of(handle)

    await enrolment.enrol()

    async with asyncio.timeout(30):
        assert await due.get() == _LIFETIME_S * 2 / 3 - 3600
        while handle.num_certificates < 3:
            await due.get()
    enrolment.close()
    await handle.service.stop(0)
