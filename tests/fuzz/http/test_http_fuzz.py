"""A short walk of the fuzzer; `python -m tests.fuzz.http` takes longer ones."""

from tests.fuzz.http.door import running_door
from tests.fuzz.http.oracle import Log
from tests.fuzz.http.runner import fuzz
from tests.fuzz.http.wire_cases import REQUESTS, WireCases


def test_whatever_comes_at_the_http_door_gets_one_documented_answer_and_leaves_nothing() -> None:
    log = fuzz(7, lambda num_rounds: num_rounds < 1, num_examples=10)
    assert list(map(str, log.findings.values())) == []
    served = {where for where, status in log.statuses if status == 200}
    assert {"POST /v1/completions", "POST /v1/chat/completions", "bytes on a connection"} <= served


def test_fuzzer_notices_an_answer_that_is_missing() -> None:
    log = Log()
    with running_door() as door:
        cases = WireCases(door, log)
        request, status = REQUESTS[0]
        cases._expect([request[:-2] + b"connection: close\r\n\r\n"], [status])  # noqa: SLF001
        assert not log.findings
        cases._expect([request[:-2] + b"connection: close\r\n\r\n"], [status, status])  # noqa: SLF001
    assert len(log.findings) == 1
