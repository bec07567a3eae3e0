"""The shell in which a service runs as an actor: the same service, started by another process's supervisor.

No Ray in here: the class is a plain one whose coroutines run on one event loop, and whoever launches it makes it an
actor. A restarted actor runs `__init__` again and serves again once the controller has given it a certificate.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config import ServingConfig
from common.log import setup_logging
from common.output_log import send_output_to
from common.ports import names_of
from common.process import ProcessIdentity, Ready, RunningService, ready_of
from common.trust.credentials import Credentials
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.identity import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """What an actor needs to run its service. By value: the actor may be on a host without the sender's files."""

    name: str
    config: ServingConfig
    host: str | None
    """None: the address by which other hosts reach this one."""
    port: int
    env: Mapping[str, str]
    """Environment to set before anything heavy is imported."""
    role: str
    """What it is started as, as `cluster.processes.plan.ProcessRole` says it."""
    log_path: Path | None
    """Gets stdout and stderr of the process, where its folder exists."""


class ServiceActor(ABC):
    """One service; starts on the running event loop once it has been given a certificate."""

    def __init__(self, params: ServiceParams) -> None:
        os.environ.update(params.env)
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
        """Return the address by which other hosts reach this one."""

    @abstractmethod
    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the service. Imports it here: its libraries read the environment when they are loaded."""

    async def _start(self, params: ServiceParams) -> RunningService:
        await self._is_enrolled.wait()
        return await self.start_service(params, self._credentials, self._host)

    async def request_certificate(self) -> EnrolmentRequest:
        """Return a request for a certificate; `accept_certificate` has to follow."""
        names = () if self._door_names is None else (*names_of(self._host), *self._door_names)
        return self._credentials.request(names)

    async def accept_certificate(self, enrolment: Enrolment) -> bool:
        """Take a certificate: the first one lets the service start, later ones take the place of the one before.

        Returns False for one that this life has not asked for, or not last.
        """
        try:
            self._credentials.accept(enrolment)
        except ValueError:
            return False
        self._is_enrolled.set()
        return True

    async def ready(self) -> Ready:
        """Return where it serves, once it does. Raises what the start raised."""
        return ready_of(await asyncio.shield(self._service))

    async def identity(self) -> ProcessIdentity:
        """Return which process this is."""
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None, "this process is alive"
        return identity

    async def stop(self, grace_s: float) -> None:
        """Drain and stop the service; the process stays. Never raises for a service that failed to start."""
        if not self._service.done():
            self._service.cancel()
        await asyncio.wait([self._service])
        if not self._service.cancelled() and self._service.exception() is None:
            await self._service.result().stop(grace_s)
