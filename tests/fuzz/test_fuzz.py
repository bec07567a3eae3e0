"""The fuzzers find each fault put in on purpose, and nothing in kept inputs, old findings and some inputs by chance."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.trust.guard import Guard
from common.trust.identity import Identity, Role
from common.trust.proofs import ProofVerifier
from kv_transfer import serve
from kv_transfer.handoff import HandoffTable
from router.reading.validation import RequestReader
from tests.fuzz.callers import WORDS
from tests.fuzz.child import CORPUS, REGRESSIONS, mutate, read_inputs, read_kept
from tests.fuzz.http.__main__ import fuzz
from tests.fuzz.http.door import running_door
from tests.fuzz.http.oracle import Log
from tests.fuzz.http.wire_cases import REQUESTS, WireCases
from tests.fuzz.members import DENIED, credentials_of
from tests.fuzz.runner import MAX_LOOP_S, Finding, Runner
from tests.fuzz.targets.catalog import TARGETS

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
    assert {finding.kind for finding in router.try_input(PLAIN)} - {"slow"} == {"hang"}  # a busy machine is slow


def test_busy_event_loop_is_found(router: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(*_args: Any, **_options: Any) -> tuple[str, ...]:
        ends_s = time.thread_time() + 3 * MAX_LOOP_S
        while time.thread_time() < ends_s:
            pass
        return ()

    monkeypatch.setattr(RequestReader, "pieces", pieces)
    assert kinds(router, bytes([0, 2])) == {"slow"}


def test_handoff_that_stays_is_found(pull_server: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_of_a_handoff_that_nobody_fills = bytes([0, 0, 0, 0, 2])
    assert kinds(pull_server, fetch_of_a_handoff_that_nobody_fills) == set()
    monkeypatch.setattr(HandoffTable, "abort", lambda *_args: None)
    monkeypatch.setattr(HandoffTable, "sweep", lambda _self: None)
    assert "held" in kinds(pull_server, fetch_of_a_handoff_that_nobody_fills)


def test_call_served_to_a_caller_who_may_not_make_it_is_found(worker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
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

    trust.try_input(bytes([0]))  # as above
    monkeypatch.setattr(ProofVerifier, "verify", decode)
    assert kinds(trust, bytes([0])) == {"raised"}


_NUM_BY_CHANCE = 40
"""Inputs per target: a count, not a time, so that every machine runs the same ones."""
_MAX_BYTES = 300_000


@pytest.fixture(params=TARGETS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(TARGETS[request.param](), max_loop_s=MAX_LOOP_S).running() as running:
        yield running


def found_in(runner: Runner, data: bytes) -> list[Finding]:
    """Return what is wrong with an input again and again: a busy machine is slow once."""
    return runner.try_again(data) if runner.try_input(data) else []


def test_kept_inputs_and_regressions_are_served(runner: Runner) -> None:
    name = runner.target.name
    for data in (*runner.target.seeds(), *read_inputs([REGRESSIONS / name]), *read_kept(name)):
        assert found_in(runner, data) == [], data.hex()


def test_inputs_by_chance_are_served(runner: Runner) -> None:
    draw = random.Random(1)
    inputs = read_kept(runner.target.name)
    for _ in range(_NUM_BY_CHANCE):
        data = mutate(draw, inputs)
        assert found_in(runner, data) == [], data.hex()


def test_the_inputs_that_are_kept_are_small() -> None:
    files = [path for root in (CORPUS, REGRESSIONS) for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= _MAX_BYTES


def test_any_input_of_the_http_door_gets_one_documented_answer() -> None:
    log = fuzz(7, lambda num_rounds: num_rounds < 1, num_examples=3)
    assert list(map(str, log.findings.values())) == []
    served = {where for where, status in log.statuses if status == 200}
    endpoints = {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses"}
    assert endpoints | {"bytes on a connection"} <= served


def test_fuzzer_notices_an_answer_that_is_missing() -> None:
    log = Log()
    with running_door() as door:
        cases = WireCases(door, log)
        request, status = REQUESTS[0]
        cases._expect([request[:-2] + b"connection: close\r\n\r\n"], [status])  # noqa: SLF001
        assert not log.findings
        cases._expect([request[:-2] + b"connection: close\r\n\r\n"], [status, status])  # noqa: SLF001
    assert len(log.findings) == 1
