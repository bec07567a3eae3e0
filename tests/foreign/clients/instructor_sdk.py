"""Instructor: structured extraction by a schema and by a tool."""

from typing import Any

import instructor
import openai
from cases import ASK, OPTIONS, Person, base_url, run

plain = openai.OpenAI(base_url=base_url(), api_key="any", max_retries=0)


def _extract(mode: instructor.Mode, **options: Any) -> Any:
    client = instructor.from_openai(plain, mode=mode)
    asked: Any = {"messages": ASK, "response_model": Person, "max_retries": 0, "seed": 1, **OPTIONS, **options}
    found = client.chat.completions.create(**asked)
    assert isinstance(found, Person)
    return found.model_dump()


def json_schema() -> Any:
    """By `response_format`."""
    return _extract(instructor.Mode.JSON_SCHEMA)


def tools() -> Any:
    """By a named tool."""
    return _extract(instructor.Mode.TOOLS)


def tools_strict() -> Any:
    """By a named tool with `strict`."""
    return _extract(instructor.Mode.TOOLS_STRICT)


def partial() -> Any:
    """Partial objects of a stream; the last one is whole."""
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        messages=ASK, response_model=Person, max_retries=0, seed=2, **OPTIONS
    )
    return Person.model_validate(last.model_dump()).model_dump()


if __name__ == "__main__":
    run(json_schema, tools, tools_strict, partial)
