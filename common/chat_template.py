"""Renders a conversation with the model's own chat template.

A template is a Jinja2 program that comes with the checkpoint. It runs in a sandbox that lets it read the conversation
and write text, with the functions and the whitespace rules that templates are written for. Its output is a function of
the conversation and of the given time alone, on any host: the time is in UTC, and no randomness is available.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.chat.detection import begun_answer
from common.chat.json_reader import object_in
from common.errors import InvalidRequest

ROLES = ("system", "user", "assistant", "tool")
_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "strftime_now"))
_ARGUMENTS_AS_TEXT = re.compile(r"arguments\s+is\s+string|\['arguments'\]\s*\+")
"""Templates that take the arguments of a tool call as text say so, or join them to text; all others write them with
`tojson`."""
_CALLS_WITHOUT_CONTENT = re.compile(r"== 'assistant' and message\['content'\] is none")
"""Templates that write tool calls only where there is no content, as DeepSeek-R1's."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, tools and variables for a chat template, in the form of Hugging Face's templates."""

    messages: Sequence[Mapping[str, Any]]
    """Each has `role` and `content`, and perhaps `tool_calls`, `tool_call_id`, `reasoning_content` and `name`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as OpenAI's API describes them: {"type": "function", "function": {"name": …, …}}."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    begun: Mapping[str, Any] | None = None
    """The assistant's message that the answer goes on from, without calls; not among the messages."""
    num_chars: int = 0
    """Characters of all its texts."""

    @classmethod
    def plain(cls, turns: Iterable[tuple[str, str]]) -> "Conversation":
        """Return a conversation of (role, content)."""
        messages = [{"role": role, "content": content} for role, content in turns]
        return cls(messages=messages, num_chars=sum(len(message["content"]) for message in messages))

    def with_system_first(self) -> "Conversation | None":
        """Return the conversation with everything that the system says in one message before the others.

        None: it is so already.
        """
        said = [each for each in self.messages if each["role"] == "system"]
        if not said or (len(said) == 1 and self.messages[0] is said[0]):
            return None
        content = "\n\n".join(each["content"] for each in said if each["content"])
        others = [each for each in self.messages if each["role"] != "system"]
        return replace(self, messages=[{"role": "system", "content": content}, *others])


BREAK = "\udfff"
"""Stands in a conversation's texts within the spelling of a control token, so that it stays text.

Valid text holds no such character."""
_ESCAPED_BREAK = json.dumps(BREAK)[1:-1]


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Compile `source`, and `tool_source` for conversations with tools, where they have a template of their own.

        Special tokens (`bos_token` and so on) are variables in both. Raises TemplateSyntaxError.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        del environment.globals["lipsum"], environment.filters["random"]
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        """The text of both, for what they say of markup."""
        self._program = _Program(environment, source)
        self._tool_program = self._program if tool_source is None else _Program(environment, tool_source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, conversation: Conversation, *, rendered_unix_s: int, marked: Callable[[str], str] | None = None
    ) -> str:
        """Return the prompt for a conversation, up to where the assistant's answer begins.

        Templates may write the date of `rendered_unix_s`. The conversation's texts are rendered as `marked` returns
        them, which may put BREAK into them. Raises InvalidRequest with the message and its field, or with the
        template's objection.
        """
        _check(conversation)
        now = datetime.fromtimestamp(rendered_unix_s, UTC).replace(tzinfo=None)
        program = self._tool_program if conversation.tools else self._program
        given = {
            "messages": [program.message(each) for each in conversation.messages],
            "tools": conversation.tools or None,
        }
        variables = conversation.variables
        if marked is not None:
            given, variables = _mapped(given, marked), _mapped(variables, marked)
        try:
            rendered = program.template.render(
                **{**self._special_tokens, **variables},
                **given,
                strftime_now=now.strftime,
                documents=None,
                add_generation_prompt=True,
            )
        except _TEMPLATE_FAULTS as error:
            if (folded := conversation.with_system_first()) is not None:  # many templates refuse it anywhere else
                return self.render(folded, rendered_unix_s=rendered_unix_s, marked=marked)
            objection = str(error).replace(BREAK, "")
            raise InvalidRequest(
                f"the model's chat template refuses the conversation: {objection}", field="chat.messages"
            ) from error
        if (begun := conversation.begun) is not None:
            rendered = begun_answer(rendered, begun if marked is None else _mapped(begun, marked))
        # Whatever a client may have hidden in tools and variables.
        check_unicode(rendered if marked is None else rendered.replace(BREAK, ""), field="chat")
        return rendered


class _Program:
    """One template, and the form in which it takes messages."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str) -> None:
        self.template = environment.from_string(source)
        self._takes_arguments_as_text = bool(_ARGUMENTS_AS_TEXT.search(source))
        self._wants_no_content = bool(_CALLS_WITHOUT_CONTENT.search(source))

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message as the template takes it: most want the arguments of tool calls as objects."""
        if not message.get("tool_calls"):
            return message
        if self._wants_no_content:
            message = {**message, "content": message["content"] or None}
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def _arguments(self, text: str) -> dict[str, Any] | str:
        """Return the arguments of an earlier call, which a client may have sent empty, cut or encoded twice."""
        found = object_in(text) or "{}"
        return found if self._takes_arguments_as_text else _loaded(found)


def _loaded(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, with U+FFFD for half a pair of escapes, which has no UTF-8 form."""
    if "\\ud" in arguments.lower():
        halves = json.dumps(json.loads(arguments), ensure_ascii=False).encode("utf-16", "surrogatepass")
        arguments = halves.decode("utf-16", "replace")
    loaded: dict[str, Any] = json.loads(arguments)
    return loaded


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value


def check_unicode(text: str, *, field: str) -> None:
    """Raise InvalidRequest when `text` holds a lone surrogate, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"character {error.start} is a lone surrogate: not valid Unicode", field=field) from error


def _check(conversation: Conversation) -> None:
    if taken := _OWN_VARIABLES & conversation.variables.keys():
        raise InvalidRequest(f"{sorted(taken)[0]} is set by the server", field="chat.template_variables")
    if not conversation.messages:
        raise InvalidRequest("the conversation has no message", field="chat.messages")
    for position, message in enumerate(conversation.messages):
        role, content = message["role"], message["content"]
        if role not in ROLES:
            allowed = ", ".join(ROLES)
            raise InvalidRequest(
                f"role is {role[:40]!r}; allowed are {allowed}", field=f"chat.messages[{position}].role"
            )
        check_unicode(content, field=f"chat.messages[{position}].content")


class LineTemplate:
    """The template of the fake engine: a line for the tools and each message, and the start of the answer's line."""

    source = '<tool_call>{"name": …, "arguments": …}</tool_call>'
    """The markup of tool calls in its answers, as of the models that it stands for."""

    def render(self, conversation: Conversation, *, rendered_unix_s: int) -> str:
        """Return the lines; they do not depend on the time. Raises InvalidRequest with the message and its field."""
        _check(conversation)
        lines = [f"tools: {_tojson(conversation.tools)}"] if conversation.tools else []
        for message in conversation.messages:
            calls = f" {_tojson(message['tool_calls'])}" if message.get("tool_calls") else ""
            lines.append(f"{message['role']}: {message['content']}{calls}")
        lines += map(_variable, conversation.variables.items())
        prompt = "\n".join([*lines, "assistant:"])
        if conversation.begun is not None:
            prompt = begun_answer(f"{prompt} ", conversation.begun)
        check_unicode(prompt, field="chat")
        return prompt


def _variable(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} = {_tojson(value)}"


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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_ESCAPED_BREAK, BREAK) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
