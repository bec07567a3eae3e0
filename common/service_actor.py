"""Runs a service as an actor, started by the supervisor of another process.

Independent of Ray: a plain class whose coroutines run on one event loop; its launcher makes it an actor. A restarted
actor runs `__init__` again, and serves again once the controller has given it a certificate.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config import ServingConfig
from common.log import send_output_to, setup_logging
from common.ports import names_of
from common.process import ProcessIdentity, Ready, RunningService, ready_of, spare_loaded_objects
from common.trust.credentials import Credentials
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.identity import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """Parameters of an actor's service. By value: the actor may be on a host without the sender's files."""

    name: str
    config: ServingConfig
    host: str | None
    """Address to listen on; None: the address under which other hosts reach this one."""
    port: int
    env: Mapping[str, str]
    """Environment to set before anything heavy is imported."""
    role: str
    """Role of the process, as in `cluster.processes.plan.ProcessRole`."""
    log_path: Path | None
    """Log of stdout and stderr of the process, if its folder exists."""
    working_dir: Path | None = None
    """Working directory of the process; None: as it is."""


class ServiceActor(ABC):
    """One service; starts on the running event loop once it has a certificate."""

    def __init__(self, params: ServiceParams) -> None:
        os.environ.update(params.env)
        if params.working_dir is not None:
            os.chdir(params.working_dir)
        if params.log_path is not None and params.log_path.parent.is_dir():
            send_output_to(params.log_path)
        setup_logging(params.name)
        self._host = params.host or self.node_address()
        self._door_names = params.config.tls.names if params.role == Role.ROUTER else None
        self._credentials = Credentials()
        self._is_enrolled = asyncio.Event()
        self._service = asyncio.get_running_loop().create_task(self._start(params))

    @abstractmethod
    def node_address(self) -> str:
        """Return the address under which other hosts reach this one."""

    @abstractmethod
    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the service. Must import it inside: its libraries read the environment at import."""

    def on_serving(self, service: RunningService) -> None:  # noqa: B027 - optional
        """Called once the service serves, for what a launcher adds to it."""

    async def _start(self, params: ServiceParams) -> RunningService:
        await self._is_enrolled.wait()
        service = await self.start_service(params, self._credentials, self._host)
        spare_loaded_objects()
        service.watchdog.start()
        self.on_serving(service)
        return service

    async def request_certificate(self) -> EnrolmentRequest:
        """Return a request for a certificate; `accept_certificate` has to follow."""
        names = () if self._door_names is None else (*names_of(self._host), *self._door_names)
        return self._credentials.request(names)

    async def accept_certificate(self, enrolment: Enrolment) -> bool:
        """Accept a certificate: the first one starts the service, later ones replace their predecessor.

        Returns False for a certificate that does not answer the latest request of this process.
        """
        try:
            self._credentials.accept(enrolment)
        except ValueError:
            return False
        self._is_enrolled.set()
        return True

    async def ready(self) -> Ready:
        """Return the addresses of the service once it serves. Raises the exception of a failed start."""
        return ready_of(await asyncio.shield(self._service))

    async def identity(self) -> ProcessIdentity:
        """Return the identity of this process."""
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process is alive"
        return identity

    async def stop(self, grace_s: float) -> None:
        """Drain and stop the service; the process stays. Does not raise if the service failed to start."""
        if not self._service.done():
            self._service.cancel()
        await asyncio.wait([self._service])
        if not self._service.cancelled() and self._service.exception() is None:
            await self._service.result().stop(grace_s)
