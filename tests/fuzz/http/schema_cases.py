"""Requests made from the door's OpenAPI document: bodies that fit it, and bodies that break it in one place.

Most random bodies are refused at their first field. So a refused one is sent again without the field that was named, or
with a plain prompt, until it is served: what runs in the end has passed every check with values that no author would
think of.
"""

import json
import random
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

from router.http.routes import ENDPOINTS, Endpoint, openapi_document
from tests.fuzz.http.door import Door
from tests.fuzz.http.oracle import Log, complaint

TIMEOUT_S = 30.0
_MAX_REPAIRS = 20
_PLAIN = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "tokens": [1], "max_tokens": 1}
"""Stand in for what a body needs, where the one by chance is refused."""
_POSITIVE, _NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
_CHECKS = [content_type_conformance, negative_data_rejection, response_schema_conformance]


class SchemaCases:
    """Makes requests and judges their answers."""

    def __init__(self, door: Door, log: Log) -> None:
        self._door = door
        self._log = log
        self._session = requests.Session()
        self._schema = schemathesis.openapi.from_dict(openapi_document())

    def close(self) -> None:
        self._session.close()

    def run(self, number: int, *, num_examples: int) -> None:
        """Send that many requests of each kind to each endpoint; they follow from the number."""
        for endpoint in ENDPOINTS:
            operation = self._schema[endpoint.public_path][endpoint.method]
            modes = (_POSITIVE, _NEGATIVE) if endpoint.body is not None else (_POSITIVE,)
            for mode in modes:
                self._run(operation, endpoint, mode, number=number, num_examples=num_examples)

    def _run(self, operation: Any, endpoint: Endpoint, mode: Any, *, number: int, num_examples: int) -> None:
        draw = random.Random(f"{number} {endpoint.name} {mode.value}")

        @seed(draw.getrandbits(32))
        @settings(
            max_examples=num_examples if endpoint.body is not None else max(1, num_examples // 5),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if mode is _NEGATIVE:
                self._send(case, endpoint)
            else:
                self._send_repaired(case, endpoint)

        send()

    def _send_repaired(self, case: Any, endpoint: Endpoint) -> None:
        for _ in range(_MAX_REPAIRS):
            field = self._send(case, endpoint)
            name = (field or "").partition("[")[0].partition(".")[0]
            if not isinstance(case.body, dict) or name not in case.body or case.body[name] == _PLAIN.get(name):
                return
            if name in _PLAIN:
                case.body[name] = _PLAIN[name]
            else:
                del case.body[name]

    def _send(self, case: Any, endpoint: Endpoint) -> str | None:
        """Send a request; return the field that was refused."""
        where = f"{endpoint.method} {endpoint.path}"
        with self._door.watched(TIMEOUT_S - 1) as stacks:
            try:
                answer = case.call(base_url=self._door.url, session=self._session, timeout=TIMEOUT_S)
            except requests.RequestException as error:
                self._log.find(where, f"no answer: {type(error).__name__}", case.body, stacks)
                return None
        status, content = answer.status_code, answer.content
        self._log.statuses[where, status] += 1
        what = complaint(endpoint, status, body=case.body, answer=content)
        if what is None and status != 413:  # a refusal of any body, valid or not, which the checks do not know
            try:
                case.validate_response(answer, checks=_CHECKS)
            except (Failure, FailureGroup) as failure:
                what = str(failure)
        if what is not None:
            self._log.find(where, what, case.body)
        return json.loads(content)["error"]["param"] if status in (400, 404) else None
