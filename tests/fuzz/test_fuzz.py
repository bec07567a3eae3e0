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
from tests.fuzz.inputs import CORPUS, REGRESSIONS, mutate, read_inputs, read_kept
from tests.fuzz.members import DENIED, credentials_of
from tests.fuzz.openapi import fuzz
from tests.fuzz.runner import MAX_LOOP_S, Finding, Runner
from tests.fuzz.targets import http_door
from tests.fuzz.targets.catalog import TARGETS

PLAIN = bytes(2)
"""One call without a change; of the router, a request for some tokens."""


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """What tries inputs of a target, which the test names."""
    with Runner(TARGETS[request.param]()).running() as running:
        yield running


def of(*names: str) -> pytest.MarkDecorator:
    """Let a test run on targets."""
    return pytest.mark.parametrize("runner", names, indirect=True)


def kinds(runner: Runner, data: bytes) -> set[str]:
    return {finding.kind for finding in runner.try_again(data)}


@of("router")
def test_plain_input_has_no_findings(runner: Runner) -> None:
    assert kinds(runner, PLAIN) == set()


@of("router")
def test_unexpected_exception_of_a_handler_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_args: Any, **_options: Any) -> None:
        raise KeyError("an unexpected fault")

    runner.try_input(PLAIN)  # the world itself is warmed up by a request
    monkeypatch.setattr(RequestReader, "read", read)
    assert {finding.kind for finding in runner.try_input(PLAIN)} == {"status", "log"}


@of("router")
def test_request_without_an_end_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_args: Any, **_options: Any) -> None:
        await asyncio.Event().wait()

    runner.try_input(PLAIN)
    monkeypatch.setattr(RequestReader, "read", read)
    assert {finding.kind for finding in runner.try_input(PLAIN)} - {"slow"} == {"hang"}  # a busy machine is slow


@of("router")
def test_busy_event_loop_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(*_args: Any, **_options: Any) -> tuple[str, ...]:
        ends_s = time.thread_time() + 3 * MAX_LOOP_S
        while time.thread_time() < ends_s:
            pass
        return ()

    monkeypatch.setattr(RequestReader, "pieces", pieces)
    assert kinds(runner, bytes([0, 2])) == {"slow"}


@of("worker")
def test_handoff_that_stays_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_of_a_handoff_that_nobody_fills = bytes([0, 3, 0, 0, 2])
    assert kinds(runner, fetch_of_a_handoff_that_nobody_fills) == set()
    monkeypatch.setattr(HandoffTable, "abort", lambda *_args: None)
    monkeypatch.setattr(HandoffTable, "sweep", lambda _self: None)
    assert "held" in kinds(runner, fetch_of_a_handoff_that_nobody_fills)


@of("worker")
def test_call_served_to_a_caller_who_may_not_make_it_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_without_a_proof = bytes([*bytes(7), 255, 0])
    assert kinds(runner, decode_without_a_proof) == set()
    real = Guard._by_proof  # noqa: SLF001

    def by_proof(guard: Guard, metadata: Any) -> Identity:
        return real(guard, metadata) if metadata != (DENIED,) else credentials_of(Role.ROUTER, "router-0").identity

    monkeypatch.setattr(Guard, "_by_proof", by_proof)
    assert kinds(runner, decode_without_a_proof) == {"status", "protocol"}


@of("worker")
def test_pull_that_its_ticket_does_not_allow_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_with_a_ticket_of_a_worker = bytes([0, 3, *bytes(9), 0, 255, WORDS.index("ticket-of-worker")])
    assert kinds(runner, fetch_with_a_ticket_of_a_worker) == set()
    monkeypatch.setattr(serve, "check_ticket", lambda *_args, **_options: None)
    assert kinds(runner, fetch_with_a_ticket_of_a_worker) == {"protocol"}


@of("trust")
def test_undocumented_exception_of_a_check_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_args: Any, **_options: Any) -> None:
        raise KeyError("an unexpected fault")

    runner.try_input(bytes([0]))  # as above
    monkeypatch.setattr(ProofVerifier, "verify", decode)
    assert kinds(runner, bytes([0])) == {"raised"}


_NUM_BY_CHANCE = 40
"""Inputs per target: a count, not a time, so that every machine runs the same ones."""
_MAX_BYTES = 300_000


def found_in(runner: Runner, data: bytes) -> list[Finding]:
    """Return what is wrong with an input again and again: a busy machine is slow once."""
    return runner.try_again(data) if runner.try_input(data) else []


@of(*TARGETS)
def test_kept_inputs_and_regressions_are_served(runner: Runner) -> None:
    name = runner.target.name
    for data in (*runner.target.seeds(), *read_inputs(REGRESSIONS / name), *read_kept(name)):
        assert found_in(runner, data) == [], data.hex()


@of(*TARGETS)
def test_inputs_by_chance_are_served(runner: Runner) -> None:
    draw = random.Random(1)
    inputs = read_kept(runner.target.name)
    for _ in range(_NUM_BY_CHANCE):
        data = mutate(draw, inputs)
        assert found_in(runner, data) == [], data.hex()


def test_the_inputs_that_are_kept_are_small() -> None:
    files = [path for root in (CORPUS, REGRESSIONS) for path in root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= _MAX_BYTES


async def test_any_request_made_from_the_document_gets_one_documented_answer() -> None:
    fuzzer = await fuzz(7, lambda num_rounds: num_rounds < 1, num_examples=3)
    assert list(fuzzer.findings.values()) == []
    served = {where for where, status in fuzzer.statuses if status == 200}
    assert {"completions", "chat", "responses", "messages", "embeddings"} <= served


@of("http")
def test_answer_that_is_missing_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    two_right_requests = bytes([1, 0, 0, 1])
    assert kinds(runner, two_right_requests) == set()
    (request, _status), *others = http_door.RIGHT
    monkeypatch.setattr(http_door, "RIGHT", [(b"", 200), (request, 200), *others])
    assert kinds(runner, two_right_requests) == {"protocol"}
