"""Requests made from the door's OpenAPI document, in front of real workers with fake engines.

    python -m tests.fuzz.openapi --seconds 60 [--seed 7]

Bodies fit the document, or break it in one place. Most random bodies are refused at their first field. So a refused one
is sent again without the field that was named, or with a plain prompt, until it is served: what runs in the end has
passed every check with values that no author would think of. After every round nothing may be held anywhere.
"""

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)

from router.http.errors import OPENAI
from router.http.routes import ENDPOINTS, Endpoint, openapi_document
from tests.e2e.in_process import System, running_system
from tests.fuzz.http import Answer, Answers

TIMEOUT_S = 30.0
_ROUTER = {"http_port": 0, "default_max_tokens": 8, "max_message_mib": 1, "queue_timeout_s": 5.0}
_MAX_REPAIRS = 20
_PLAIN = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "tokens": [1], "max_tokens": 1}
"""Stand in for what a body needs, where the one by chance is refused."""
_FITTING, _BROKEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
_CHECKS = [content_type_conformance, negative_data_rejection, response_schema_conformance]


class OpenApiFuzzer:
    """Sends requests, and keeps one finding of each kind and place."""

    def __init__(self, system: System) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        """Answers by endpoint and status."""
        self.findings: dict[str, str] = {}
        self._system = system
        self._schema: Any = schemathesis.openapi.from_dict(openapi_document())

    async def run(self, number: int, *, num_examples: int) -> None:
        """Send that many requests of each kind to each endpoint; they follow from the number."""
        for endpoint in ENDPOINTS:
            operation = self._schema[endpoint.public_path][endpoint.method]
            for mode in (_FITTING, _BROKEN) if endpoint.body is not None else (_FITTING,):
                strategy = operation.as_strategy(generation_mode=mode)
                for case in _drawn(strategy, number, count=num_examples if endpoint.body is not None else 1):
                    await self._send(endpoint, case, num_tries=1 if mode is _BROKEN else _MAX_REPAIRS)
        try:
            await self._system.until_idle()
        except TimeoutError:
            self._find("round", "something is still held", number)

    async def _send(self, endpoint: Endpoint, case: Any, *, num_tries: int) -> None:
        """Send a request, then what is left of it, until it is served."""
        for _ in range(num_tries):
            request = requests.Request(**case.as_transport_kwargs(base_url="http://127.0.0.1:1")).prepare()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    (answer,) = Answers(await self._ask(_raw(request))).found
            except (TimeoutError, OSError, ValueError) as error:
                self._find(endpoint.name, f"not one answer: {type(error).__name__}", case.body)
                return
            self.statuses[endpoint.name, answer.status] += 1
            if what := _complaint(endpoint, case, answer, request):
                self._find(endpoint.name, what, case.body)
            if not _is_repaired(case.body, answer):
                return

    async def _ask(self, raw: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._system.router.http_port)
        try:
            writer.write(raw)
            return await reader.read()
        finally:
            writer.transport.abort()

    def _find(self, where: str, what: str, body: object) -> None:
        self.findings.setdefault(f"{where} {what[:60]}", f"{where}: {what}\n    {repr(body)[:2000]}")


def _drawn(strategy: Any, number: int, *, count: int) -> Sequence[Any]:
    """Return some examples, of which the first is always the simplest."""
    drawn: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def keep(case: Any) -> None:
        drawn.append(case)

    keep()
    return drawn


def _raw(request: requests.PreparedRequest) -> bytes:
    """Return the bytes of a request that is the last one of its connection."""
    body = request.body or b""
    assert isinstance(body, bytes)
    headers = {**request.headers, "Host": "127.0.0.1", "Connection": "close"}
    lines = [f"{name}: {value!s}" for name, value in headers.items()]
    return "\r\n".join([f"{request.method} {request.path_url} HTTP/1.1", *lines, "", ""]).encode() + body


def _is_repaired(body: Any, answer: Answer) -> bool:
    """Put something plain in place of the field that was refused, or nothing; return whether anything was changed."""
    if answer.status not in (400, 404):
        return False
    name = (json.loads(answer.body)["error"]["param"] or "").partition("[")[0].partition(".")[0]
    if not isinstance(body, dict) or name not in body or body[name] == _PLAIN.get(name):
        return False
    if name in _PLAIN:
        body[name] = _PLAIN[name]
    else:
        del body[name]
    return True


def _complaint(endpoint: Endpoint, case: Any, answer: Answer, request: requests.PreparedRequest) -> str:
    """Return what is wrong about an answer; empty, if nothing is."""
    status, told = answer.status, f"{answer.body[:300]!r}"
    if status not in endpoint.statuses:
        return f"status {status} is not documented: {told}"
    if status in (408, 500, 503):
        return f"status {status} of a cluster that is well: {told}"
    if status == 504 and not _has_deadline(case.body):
        return f"status 504 without a deadline: {told}"
    if status != 200:
        code = {"code"} if endpoint.dialect is OPENAI else set()
        if set(json.loads(answer.body)["error"]) != {"message", "type", "param"} | code:
            return f"an error of another form: {told}"
    if status == 413:  # a refusal of any body, fitting or not, which the checks do not know
        return ""
    headers = {name.decode(): [value.decode()] for name, value in answer.headers}
    response = schemathesis.Response(status, headers, answer.body, request, elapsed=0.0, verify=False)
    try:
        case.validate_response(response, checks=_CHECKS)
    except (Failure, FailureGroup) as failure:
        return str(failure)
    return ""


def _has_deadline(body: Any) -> bool:
    extension = body.get("kvrelay") if isinstance(body, dict) else None
    return isinstance(extension, dict) and extension.get("timeout_s") is not None


async def fuzz(number: int, goes_on: Callable[[int], bool], *, num_examples: int) -> OpenApiFuzzer:
    """Run rounds while `goes_on` says so of the number of those that are over; return what happened."""
    async with running_system(router=_ROUTER) as system:
        fuzzer, num_rounds = OpenApiFuzzer(system), 0
        while num_rounds == 0 or goes_on(num_rounds):
            await fuzzer.run(number * 1_000_003 + num_rounds, num_examples=num_examples)
            num_rounds += 1
    return fuzzer


def main() -> int:
    """Fuzz for some time; return 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi", description="Fuzz the HTTP door.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 20), help="what is sent follows from it")
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    end_s = time.monotonic() + args.seconds
    fuzzer = asyncio.run(fuzz(args.seed, lambda _num_rounds: time.monotonic() < end_s, num_examples=15))
    for (where, status), count in sorted(fuzzer.statuses.items()):
        sys.stdout.write(f"{count:8} {status} {where}\n")
    for finding in fuzzer.findings.values():
        sys.stdout.write(f"FOUND {finding}\n")
    return 1 if fuzzer.findings else 0


if __name__ == "__main__":
    sys.exit(main())
