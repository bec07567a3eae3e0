"""Runs the cases of a client's script and prints what each of them saw."""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person; its JSON schema bounds every value, since the fake engine's answers are noise."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


OPTIONS: dict[str, Any] = {"model": "fake", "temperature": 1.0, "max_tokens": 400}
ASK: list[Any] = [{"role": "user", "content": "Who is it?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def base_url() -> str:
    """Return the address of the API that the test gives."""
    return sys.argv[1]


def run(*cases: Callable[[], Any]) -> None:
    """Run every case and print one JSON object: name to `{"saw": …}` or `{"error": …}`."""
    outcomes: dict[str, Any] = {}
    for case in cases:
        try:
            outcomes[case.__name__] = {"saw": case()}
        except Exception:  # noqa: BLE001 - the test reports it
            outcomes[case.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(outcomes))  # noqa: T201
