"""Conditions that every answer has to meet."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.http.errors import OPENAI
from router.http.routes import ENDPOINTS, Endpoint

STATUSES = {status for endpoint in ENDPOINTS for status in endpoint.statuses}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that should not have happened."""

    where: str
    what: str
    request: str
    stacks: Sequence[str] = ()
    """Stacks of the door's tasks, where there was no answer."""

    def __str__(self) -> str:
        return "\n".join([f"{self.where}: {self.what}\n    {self.request[:2000]}", *self.stacks])


@dataclass(slots=True)
class Log:
    """Statuses and findings; one finding per kind and place is kept."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def find(self, where: str, what: str, request: object, stacks: Sequence[str] = ()) -> None:
        finding = Finding(where=where, what=what, request=repr(request), stacks=stacks)
        self.findings.setdefault((where, what[:60]), finding)


def complaint(endpoint: Endpoint, status: int, *, body: Any, answer: bytes) -> str | None:
    """Return what is wrong about an answer to a request of a path and method that exist, or None."""
    if status not in endpoint.statuses:
        return f"status {status} is not documented: {answer[:300]!r}"
    if status in (500, 503):
        return f"status {status} of a cluster that is well: {answer[:300]!r}"
    if status == 504 and not _has_deadline(body):
        return f"status 504 without a deadline: {answer[:300]!r}"
    if status == 408:
        return "a body that came is missed"
    if status != 200:
        error = json.loads(answer)["error"]
        code = {"code"} if endpoint.dialect is OPENAI else set()
        if set(error) != {"message", "type", "param"} | code:
            return f"an error of another form: {answer[:300]!r}"
    return None


def _has_deadline(body: Any) -> bool:
    extension = body.get("kvrelay") if isinstance(body, dict) else None
    return isinstance(extension, dict) and extension.get("timeout_s") is not None
