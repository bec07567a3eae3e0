"""The state that the live page shows: the records of status, explain and diagnose, requests, history."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from common.version import installed_version
from router.diagnosis.service import DiagnosisService
from router.diagnosis.status import StatusReporter
from router.fleet.decisions import explain
from router.observe.history import History, HistoryPoint
from router.parts import RouterParts

INTERVAL_S = 1.0
_STATUS_TIMEOUT_S = 1.0
_DIAGNOSIS_WINDOW_S = 60.0
_NUM_DECISIONS = 12
_SHOWN_AFTER_END_S = 30.0
_HISTORY = tuple(each.name for each in fields(HistoryPoint) if each.name != "ended_s")


class StateFeed:
    """Makes states, at most one each `INTERVAL_S` however many clients ask. Event loop only."""

    def __init__(self, parts: RouterParts, reporter: StatusReporter) -> None:
        self._parts = parts
        self._reporter = reporter
        self._diagnosis = DiagnosisService(parts, reporter)
        self._lock = asyncio.Lock()
        self._made_s = -INTERVAL_S
        self._latest: bytes = b""

    async def latest(self) -> bytes:
        """Return the state as JSON, at most `INTERVAL_S` old."""
        async with self._lock:
            if self._parts.clock.monotonic() - self._made_s >= INTERVAL_S:
                state = await self._make()
                self._latest = json.dumps(state, separators=(",", ":")).encode()
                self._made_s = self._parts.clock.monotonic()
        return self._latest

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a server-sent event with the state, again and again."""
        while True:
            yield b"data: " + await self.latest() + b"\n\n"
            await asyncio.sleep(INTERVAL_S)

    async def _make(self) -> Mapping[str, Any]:
        parts = self._parts
        status = await self._reporter.status(timeout_s=_STATUS_TIMEOUT_S)
        diagnosis = self._diagnosis.judge(status, window_s=_DIAGNOSIS_WINDOW_S)
        decisions = explain(
            parts.chooser.decisions.newest(_NUM_DECISIONS), policy=parts.config.policy, now_s=parts.clock.monotonic()
        )
        model = parts.fleet.model
        return {
            "version": installed_version(),
            "model": None if model is None else model.name,
            "status": _dict_of(status),
            "diagnosis": _dict_of(diagnosis),
            "history": _columns(parts.history, now_s=parts.clock.monotonic()),
            "decisions": _dict_of(decisions)["decisions"],
            "requests": [asdict(view) for view in parts.orchestrator.in_flight.views(ended_for_s=_SHOWN_AFTER_END_S)],
            "tenants": [
                {
                    "name": account.tenant.name,
                    "weight": account.tenant.weight,
                    "num_queued": account.num_queued,
                    "num_active": account.num_active,
                }
                for account in parts.admission.accounts
            ],
        }


def _columns(history: History, *, now_s: float) -> dict[str, list[float | None]]:
    """Return the points by column, which takes a sixth of the bytes of a list of points."""
    columns = {name: [getattr(point, name) for point in history.points] for name in _HISTORY}
    columns["age_s"] = [now_s - point.ended_s for point in history.points]
    return {name: [None if value is None else round(value, 5) for value in values] for name, values in columns.items()}


def _dict_of(message: Message) -> dict[str, Any]:
    """Return a message with its own field names; 64-bit integers are strings, as protobuf's JSON has them."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
