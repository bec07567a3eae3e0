"""The fuzzer finds each fault that these tests put into the services on purpose."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.trust.guard import Guard
from common.trust.identity import Identity, Role
from common.trust.proofs import ProofVerifier
from kv_transfer import serve
from kv_transfer.handoff import HandoffTable
from router.codec import ByteCodec
from router.validation import RequestReader
from tests.fuzz.members import DENIED, credentials_of
from tests.fuzz.runner import Runner
from tests.fuzz.targets.catalog import TARGETS
from tests.fuzz.tickets import WORDS

PLAIN = bytes(2)
"""One call without a change; of the router, a request for some tokens."""


def runner_of(name: str) -> Iterator[Runner]:
    with Runner(TARGETS[name]()).running() as running:
        yield running


@pytest.fixture
def router() -> Iterator[Runner]:
    yield from runner_of("router")


@pytest.fixture
def pull_server() -> Iterator[Runner]:
    yield from runner_of("pull-server")


@pytest.fixture
def worker() -> Iterator[Runner]:
    yield from runner_of("worker")


@pytest.fixture
def trust() -> Iterator[Runner]:
    yield from runner_of("trust")


def kinds(runner: Runner, data: bytes) -> set[str]:
    return {finding.kind for finding in runner.try_again(data)}


def test_plain_input_has_no_findings(router: Runner) -> None:
    assert kinds(router, PLAIN) == set()


def test_unexpected_exception_of_a_handler_is_found(router: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_args: Any, **_options: Any) -> None:
        raise KeyError("an unexpected fault")

    router.try_input(PLAIN)  # the world itself is warmed up by a request
    monkeypatch.setattr(RequestReader, "read", read)
    assert {finding.kind for finding in router.try_input(PLAIN)} == {"status", "log"}


def test_request_without_an_end_is_found(router: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_args: Any, **_options: Any) -> None:
        await asyncio.Event().wait()

    router.try_input(PLAIN)
    monkeypatch.setattr(RequestReader, "read", read)
    assert {finding.kind for finding in router.try_input(PLAIN)} == {"hang"}


def test_busy_event_loop_is_found(router: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(*_args: Any, **_options: Any) -> tuple[str, ...]:
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass
        return ()

    monkeypatch.setattr(ByteCodec, "pieces", pieces)
    assert kinds(router, bytes([0, 2])) == {"slow"}


def test_handoff_that_stays_is_found(pull_server: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_of_a_handoff_that_nobody_fills = bytes([0, 0, 0, 0, 2])
    assert kinds(pull_server, fetch_of_a_handoff_that_nobody_fills) == set()
    monkeypatch.setattr(HandoffTable, "abort", lambda *_args: None)
    monkeypatch.setattr(HandoffTable, "sweep", lambda _self: None)
    assert "held" in kinds(pull_server, fetch_of_a_handoff_that_nobody_fills)


def test_call_that_is_served_to_whoever_may_not_make_it_is_found(
    worker: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_without_a_proof = bytes([*bytes(7), 255, 0])
    assert kinds(worker, decode_without_a_proof) == set()
    real = Guard._by_proof  # noqa: SLF001

    def by_proof(guard: Guard, metadata: Any) -> Identity:
        return real(guard, metadata) if metadata != (DENIED,) else credentials_of(Role.ROUTER, "router-0").identity

    monkeypatch.setattr(Guard, "_by_proof", by_proof)
    assert kinds(worker, decode_without_a_proof) == {"status", "protocol"}


def test_pull_that_its_ticket_does_not_allow_is_found(pull_server: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_with_a_ticket_of_a_worker = bytes([*bytes(11), 0, 255, WORDS.index("ticket-of-worker")])
    assert kinds(pull_server, fetch_with_a_ticket_of_a_worker) == set()
    monkeypatch.setattr(serve, "check_ticket", lambda *_args, **_options: None)
    assert kinds(pull_server, fetch_with_a_ticket_of_a_worker) == {"protocol"}


def test_undocumented_exception_of_a_check_is_found(trust: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_args: Any, **_options: Any) -> None:
        raise KeyError("an unexpected fault")

    monkeypatch.setattr(ProofVerifier, "verify", decode)
    assert kinds(trust, bytes([0])) == {"raised"}
