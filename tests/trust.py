"""One authority for the clusters that tests build in their own process, and everybody's credentials."""

import asyncio
from functools import cache, partial

import grpc

from common.trust.access import Audience
from common.trust.authority import Authority, AuthoritySettings
from common.trust.channels import Reach
from common.trust.credentials import Credentials
from common.trust.guard import Guard
from common.trust.identity import Role
from common.trust.pipe import answer_to
from common.trust.proofs import OPERATOR_AUDIENCE

AUTHORITY = Authority.new(AuthoritySettings(cluster="test", is_encrypted=False))


@cache
def credentials_of(role: Role, name: str) -> Credentials:
    """Return the credentials of a process of the test's cluster."""
    return Credentials.of(AUTHORITY, role, name)


def reach_as(role: Role, name: str = "somebody") -> Reach:
    """Return how a process of that role calls others."""
    return Reach.of(credentials_of(role, name))


ROUTER = reach_as(Role.ROUTER, "router-0")
CONTROLLER = reach_as(Role.CONTROLLER, "controller")


def worker_guard(name: str = "worker-0") -> Guard:
    """Return what stands in front of a worker's control or KV plane."""
    return Guard(credentials_of(Role.WORKER, name), Audience.INSIDERS)


def router_guard(name: str = "router-0") -> Guard:
    """Return what stands in front of a router's administration."""
    return Guard(credentials_of(Role.ROUTER, name), Audience.INSIDERS)


def as_router(address: str) -> grpc.aio.Channel:
    """Return a channel to a worker, as a router has it."""
    return ROUTER.worker(address)


def as_controller(address: str) -> grpc.aio.Channel:
    """Return a channel to a worker, as the controller has it."""
    return CONTROLLER.worker(address)


def as_worker(address: str, name: str) -> grpc.aio.Channel:
    """Return a channel to a worker, as another one has it."""
    return reach_as(Role.WORKER, name).worker(address)


def as_controller_of_router(address: str) -> grpc.aio.Channel:
    """Return a channel to a router's administration, as the controller has it."""
    return CONTROLLER.router(address)


def operator_token() -> str:
    """Return what an operator shows at a router's door in place of an API key."""
    signer = credentials_of(Role.OPERATOR, "operator").held.signer
    return signer.sign({}, audience=OPERATOR_AUDIENCE, lifetime_s=3600)


async def enrol_child(process: asyncio.subprocess.Process, role: Role, name: str) -> None:
    """Give a child that was started by hand its certificate, as a launcher does."""
    assert process.stdin is not None
    assert process.stdout is not None
    request = (await process.stdout.readline()).decode()
    answer = answer_to(request, partial(AUTHORITY.enrol, role=role, name=name))
    assert answer is not None, request
    process.stdin.write(answer.encode())
