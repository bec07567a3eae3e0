"""Processes as named Ray actors: in a private Ray (`private_ray`), or detached in a joined Ray cluster (`joined_ray`).

Ray restarts an actor that dies, and the actor starts its service itself (`common.service_actor`); this module notices
the death and waits for the successor. Actors that an earlier controller left are taken over as they are. An actor for
which no host comes in time is given up; `host_wait_s` counts until its process answers, not while it loads its model.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.processes.launcher import RunningProcess, StartFailed, identity_role
from cluster.processes.liveness import forever, process_gone, service_gone, until_over
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.run_dir import log_path, log_tail
from cluster.ray.actors import DecodeWorker, PrefillWorker, RayActor, Router
from cluster.ray.private_ray import RayHome, bundle_of
from common.config import ServingConfig
from common.process import CannotStart, ProcessIdentity, Ready
from common.service_actor import ServiceParams
from common.trust.authority import Authority
from common.trust.channels import connect_to
from common.trust.credentials import Credentials, sleep_while
from common.trust.identity import Role
from common.trust.proofs import Validity

_ACTORS: dict[ProcessRole, type[RayActor]] = {
    ProcessRole.ROUTER: Router,
    ProcessRole.PREFILL: PrefillWorker,
    ProcessRole.DECODE: DecodeWorker,
}
logger = logging.getLogger(__name__)

_RETRY_S = 0.05
_RENEW_RETRY_S = 60.0
_RENEW_RETRY_SHARE = 1 / 8
"""Longest pause after a failed renewal, as a share of the renewal interval."""
_MAX_ENROLMENTS = 10
"""Attempts for a process that keeps dying between its request and the answer."""
_STOP_MARGIN_S = 2.0
_KILL_TIMEOUT_S = 5.0


class RayLauncher:
    """A Launcher of Ray actors. One event loop only."""

    def __init__(
        self, config: ServingConfig, *, run_dir: Path, home: RayHome, authority: Authority, credentials: Credentials
    ) -> None:
        """`authority` signs the actors' certificates; `credentials` are those of the controller."""
        self._authority = authority
        self._credentials = credentials
        self._config = config
        self._run_dir = run_dir
        self._home = home
        self._actors: dict[str, Any] = {}
        self._homeless: set[str] = set()
        """Processes that are being started and have not answered from any host."""

    async def open(self) -> None:
        """Connect to Ray, or start it, which blocks for about 3 s."""
        try:
            self._home.open()
        except (RayError, RuntimeError, OSError, ValueError) as error:
            raise StartFailed(f"Ray {self._home.description}: {error}") from error

    def found(self) -> frozenset[str]:
        """Return the names of processes that an earlier controller left."""
        return self._home.found()

    async def close(self) -> None:
        """Disconnect from Ray, or stop a private one."""
        self._actors.clear()
        await self._home.close()

    def missing_room_of(self, spec: ProcessSpec) -> str:
        """Return the room that a process without a host waits for, beside what is free on the host with most of it."""
        needs = bundle_of(spec)
        if spec.name not in self._homeless or not needs:
            return ""
        wanted = f"{_in_words(needs, 'free ')} on a {self._home.hosts_of(spec)}"
        free = [{kind: each.get(kind, 0.0) for kind in needs} for each in self._home.free_on(spec)]
        if not free:
            return f"{wanted}; there is none"
        most = max(free, key=lambda each: min(each[kind] / num for kind, num in needs.items()))
        return f"{wanted}; the best of {len(free)} has {_in_words(most)}"

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Create the actor unless it exists, and wait until its service, or that of a restarted actor, serves."""
        if (actor := self._actors.get(spec.name)) is None:
            actor = self._actors[spec.name] = self._create(spec)
        enrolment = ActorEnrolment(actor, self._authority, role=identity_role(spec.role), name=spec.name)
        try:
            ready, identity = await self._served(spec, actor, enrolment)
        except BaseException as error:
            enrolment.close()
            if isinstance(error, StartFailed | asyncio.CancelledError):  # else Ray fails: the actor may well serve
                self._discard(spec.name)
            raise
        self._home.served(spec.name)
        # Not alive here if it is on another host: an identity contains the boot time of its host.
        here = identity if identity.is_alive() else None
        connect = connect_to(identity_role(spec.role), self._credentials)
        silent = partial(service_gone, ready.admin_address, connect, is_here=here is not None)
        kill = partial(self._discard, spec.name)
        return _ActorProcess(actor=actor, ready=ready, identity=here, silent=silent, enrolment=enrolment, kill=kill)

    async def _served(
        self, spec: ProcessSpec, actor: Any, enrolment: "ActorEnrolment"
    ) -> tuple[Ready, ProcessIdentity]:
        """Wait until an actor serves. Raises StartFailed with the reason."""
        path = log_path(self._run_dir, spec.name)
        offset = path.stat().st_size if path.exists() else 0
        wait_s = (spec.config or self._config).host_wait_s

        async def enrol() -> None:
            await enrolment.enrol()
            self._homeless.discard(spec.name)

        self._homeless.add(spec.name)
        try:
            return await serving(actor, enrol, host_wait_s=wait_s)
        except TimeoutError:
            raise StartFailed(f"{spec.name}: {_no_host(spec, self._home.hosts_of(spec), wait_s)}") from None
        except (RayTaskError, RayActorError, ValueError) as error:
            reason = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(reason, CannotStart):
                raise StartFailed.explained(spec.name, reason) from error
            raise StartFailed(f"{spec.name}: {reason}\n{log_tail(path, offset=offset)}".rstrip()) from error
        finally:
            self._homeless.discard(spec.name)

    def _create(self, spec: ProcessSpec) -> Any:
        config = spec.config or self._config
        config = config.for_router(spec.index) if spec.role is ProcessRole.ROUTER else config.for_worker()
        params = ServiceParams(
            name=spec.name,
            config=config,
            host=spec.host,
            port=spec.port,
            env=dict(spec.env),
            role=str(spec.role),
            log_path=log_path(self._run_dir, spec.name),
            working_dir=self._home.working_dir,
        )
        name = f"{self._config.name}/{spec.name}"
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "max_restarts": -1,
            "max_concurrency": 1000,
        }
        try:
            return ray.remote(_ACTORS[spec.role]).options(**options, **self._home.options(spec)).remote(params)
        except (RayError, RuntimeError, OSError, ValueError) as error:  # among these: Ray's head does not answer
            raise StartFailed(f"Ray cannot make an actor {name}: {error}") from error

    def _discard(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        self._home.forget(name)


@dataclass(slots=True, kw_only=True)
class _ActorProcess:
    """A RunningProcess: one life of an actor."""

    actor: Any
    ready: Ready
    identity: ProcessIdentity | None
    silent: Callable[[], Coroutine[Any, Any, str]]
    """Waits until it no longer answers; returns the reason."""
    enrolment: "ActorEnrolment"
    kill: Callable[[], None]

    async def exited(self) -> str:
        try:
            return await until_over(self._died(), self.silent(), self._restart)
        finally:
            self.enrolment.close()

    async def _died(self) -> str:
        if self.identity is None:  # on another host: only its silence shows
            return await forever()
        await process_gone(self.identity)
        return f"process {self.ready.pid} died"

    def _restart(self) -> None:
        """End a process that does not answer; Ray restarts its actor."""
        if self.identity is not None:
            self.identity.signal(signal.SIGKILL)
            return
        with contextlib.suppress(RayError):
            ray.kill(self.actor, no_restart=False)

    async def stop(self, grace_s: float) -> None:
        self.enrolment.close()
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(grace_s + _STOP_MARGIN_S):
                await self.actor.stop.remote(grace_s)
        self.kill()
        if self.identity is not None:
            try:
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await process_gone(self.identity)
            except TimeoutError:
                self.identity.signal(signal.SIGKILL)


def _no_host(spec: ProcessSpec, hosts: str, wait_s: float) -> str:
    """Return why a process that found no host was not started, and what to do."""
    needs = bundle_of(spec)
    keys = [f"pools.{spec.role}.num_{kind.lower()}s" for kind in needs]
    advice = ["add a host", *([f"lower {' or '.join(keys)}"] if keys else []), "raise host_wait_s"]
    return (
        f"no {hosts} had {_in_words(needs, 'free ') or 'room'} within {wait_s:g} s;"
        f" {', '.join(advice[:-1])} or {advice[-1]}"
    )


def _in_words(resources: Mapping[str, float], adjective: str = "") -> str:
    return " and ".join(f"{num:g} {adjective}{kind}{'' if 0 < num <= 1 else 's'}" for kind, num in resources.items())


class ActorEnrolment:
    """The certificates of an actor, each renewed at two thirds of its life, also while the actor still starts."""

    def __init__(self, actor: Any, authority: Authority, *, role: Role, name: str) -> None:
        self._actor = actor
        self._authority = authority
        self._role = role
        self._name = name
        self._fresh = Validity.from_now(0.0)
        """Span from the signing of the newest certificate to its renewal: an actor that is importing answers late."""
        self._renewing: asyncio.Task[None] | None = None

    async def enrol(self) -> None:
        """Give it a certificate, again if it dies meanwhile. Raises RayError, ValueError after too many attempts."""
        await self._give_certificate()
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._keep_renewed(), name=f"renew certificate of {self._name}")

    def close(self) -> None:
        """Renew no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    async def _give_certificate(self) -> None:
        for _ in range(_MAX_ENROLMENTS):
            request = await self._actor.request_certificate.remote()
            enrolment = self._authority.enrol(request, role=self._role, name=self._name)
            self._fresh = Validity.from_now(self._authority.renewal_interval_s)
            if await self._actor.accept_certificate.remote(enrolment):
                return
        raise ValueError(f"cannot enrol {self._name}: it took none of {_MAX_ENROLMENTS} certificates")

    async def _keep_renewed(self) -> None:
        interval_s = self._authority.renewal_interval_s
        while True:
            await sleep_while(lambda: self._fresh.left_s)
            try:
                await self._give_certificate()
            except (RayError, ValueError) as error:
                logger.error("certificate of %s not renewed: %s", self._name, error)
                self._fresh = Validity.from_now(min(_RENEW_RETRY_S, _RENEW_RETRY_SHARE * interval_s))


async def serving(
    actor: Any, enrol: Callable[[], Awaitable[None]], *, host_wait_s: float
) -> tuple[Ready, ProcessIdentity]:
    """Enrol an actor and wait until it, or its successor, serves.

    Raises TimeoutError if it has no host for that time, RayTaskError, RayActorError without a successor, ValueError if
    it takes no certificate.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + host_wait_s
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                await enrol()
            deadline_s = loop.time() + host_wait_s  # it had a host, and may need another one
            ready: Ready = await actor.ready.remote()
            identity: ProcessIdentity = await actor.identity.remote()
        except ActorUnavailableError:
            await asyncio.sleep(_RETRY_S)
        else:
            if ready.pid == identity.pid:  # else it died between the two calls
                return ready, identity
