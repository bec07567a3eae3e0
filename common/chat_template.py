"""Renders a conversation with the model's own chat template.

A template is a Jinja2 program that comes with the checkpoint. It runs in a sandbox that lets it read the conversation
and write text, with the functions and the whitespace rules that templates are written for. Its output is a function of
the conversation and of the given time alone, on any host: the time is in UTC, and no randomness is available.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest

ROLES = ("system", "user", "assistant")

# Errors of a template on messages that it does not support: its own refusals, and failures of its expressions.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; special tokens (`bos_token` and so on) are variables in it. Raises TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        del environment.globals["lipsum"], environment.filters["random"]
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[tuple[str, str]], *, rendered_unix_s: int) -> str:
        """Return the prompt for (role, content) messages, up to where the assistant's answer begins.

        Templates may write the date of `rendered_unix_s`. Raises InvalidRequest with the message and its field, or with
        the template's objection.
        """
        _check(messages)
        now = datetime.fromtimestamp(rendered_unix_s, UTC).replace(tzinfo=None)
        try:
            return self._template.render(
                **self._special_tokens,
                strftime_now=now.strftime,
                messages=[{"role": role, "content": content} for role, content in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses the conversation: {error}", field="chat.messages"
            ) from error


def check_unicode(text: str, *, field: str) -> None:
    """Raise InvalidRequest when `text` holds a lone surrogate, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"character {error.start} is a lone surrogate: not valid Unicode", field=field) from error


def _check(messages: Sequence[tuple[str, str]]) -> None:
    if not messages:
        raise InvalidRequest("the conversation has no message", field="chat.messages")
    for position, (role, content) in enumerate(messages):
        if role not in ROLES:
            allowed = ", ".join(ROLES)
            raise InvalidRequest(
                f"role is {role[:40]!r}; allowed are {allowed}", field=f"chat.messages[{position}].role"
            )
        check_unicode(content, field=f"chat.messages[{position}].content")


class LineTemplate:
    """The template of the fake engine: a `role: content` line per message, and the start of the assistant's line."""

    def render(self, messages: Sequence[tuple[str, str]], *, rendered_unix_s: int) -> str:
        """Return the lines; they do not depend on the time. Raises InvalidRequest with the message and its field."""
        _check(messages)
        return "".join([*(f"{role}: {content}\n" for role, content in messages), "assistant:"])


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; the text stays the same."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates call it with json.dumps's own parameters
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
