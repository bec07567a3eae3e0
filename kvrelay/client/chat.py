"""Conversations: turns, tools and what has to be called; and the messages that an answer's text holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from common.chat.deltas import ParsedDelta, ToolCallDelta, call_id, joined, whole_calls
from common.chat.parsing import MessageParser
from common.wire_names import TOOL_CHOICE_NUMBERS
from kvrelay.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool by the assistant."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    id: str = ""
    """Names the call for the message with its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """The call whose result a tool's message holds."""
    reasoning: str = ""
    """The assistant's thoughts before its content."""
    name: str = ""


ChatTurn: TypeAlias = ChatMessage | Mapping[str, Any]
"""A message, or a mapping with the keys "role" and "content", and perhaps others of OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the text of an answer to a conversation is written."""

    tools: str
    """Markup of tool calls; empty: the text has none."""
    reasoning: str
    """Markup of thoughts; empty: the text has none."""
    in_reasoning: bool
    """Whether the text begins inside the thoughts."""
    forced_name: str
    """Tool whose arguments the whole text is, where calls have no markup; empty: the text is an ordinary answer."""
    parameter_types: str
    """JSON types that each parameter of the tools may have, as JSON, where calls write values as plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Message of a sample: its text without markup."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def turn(self) -> ChatMessage:
        """The message as a turn of the conversation that goes on."""
        return ChatMessage(role="assistant", content=self.content, reasoning=self.reasoning, tool_calls=self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """Addition to the message of a sample by the token before. Only for answers whose text has markup."""

    sample_index: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


class ChatOptions(TypedDict, total=False):
    """Keyword arguments for conversations."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that the model may call, each as OpenAI's API describes it."""
    tool_choice: str | Mapping[str, Any]
    """"auto", "none", "required", or the name of a tool, or OpenAI's mapping."""
    parallel_tool_calls: bool
    """Whether an answer with `tool_choice="required"` may make several calls; default: yes."""
    template_variables: Mapping[str, Any]
    """Further variables of the chat template, such as {"enable_thinking": False}."""
    thinking_budget: int
    """Most tokens that the model may think before it answers."""


CHAT_OPTIONS = frozenset(ChatOptions.__annotations__)


class MessageReader:
    """Reads the message of one sample from its text."""

    def __init__(self, answer: AnswerFormat, sample_index: int) -> None:
        self._parser = MessageParser.of(answer)
        self._sample_index = sample_index
        self._deltas: list[ParsedDelta] = []

    def read(self, text: str, *, is_last: bool) -> MessageDelta | None:
        """Take the next text and return what it adds; None for nothing."""
        delta = self._parser.push(text, is_last=is_last)
        if delta == ParsedDelta():
            return None
        self._deltas.append(delta)
        return MessageDelta(
            sample_index=self._sample_index,
            content=delta.content,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
        )

    def message(self) -> Message:
        """Return the message so far; its calls get ids that are unique in it."""
        so_far = joined(self._deltas)
        calls = [
            ToolCall(id=call_id(self._sample_index, position), name=name, arguments=arguments)
            for position, (name, arguments) in enumerate(whole_calls(so_far.tool_calls))
        ]
        return Message(content=so_far.content, reasoning=so_far.reasoning, tool_calls=tuple(calls))


def turn_of(turn: ChatTurn) -> ChatMessage:
    """Return a turn as a message. Raises TypeError."""
    if isinstance(turn, ChatMessage):
        return turn
    given = dict(turn) if isinstance(turn, Mapping) else {}
    if not {"role", "content"} <= given.keys():
        raise TypeError(f"a chat turn is a ChatMessage or a mapping with the keys role and content, not {turn!r}")
    given["content"] = given["content"] or ""
    given["tool_calls"] = [_call_of(call) for call in given.get("tool_calls") or ()]
    if "reasoning_content" in given:
        given["reasoning"] = given.pop("reasoning_content")
    return ChatMessage(**given)


def _call_of(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    return ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])


def set_chat_options(chat: pb.ChatPrompt, options: Mapping[str, Any]) -> None:
    """Set the fields of a prompt that options ask for. Raises TypeError."""
    chat.tools.extend(json.dumps(tool, ensure_ascii=False) for tool in options.get("tools") or ())
    choice = options.get("tool_choice")
    if choice is not None:
        name = choice["function"]["name"] if isinstance(choice, Mapping) else choice
        kind = None if isinstance(choice, Mapping) else TOOL_CHOICE_NUMBERS.get(name)
        chat.tool_choice.kind = pb.TOOL_CHOICE_KIND_NAMED if kind is None else kind
        chat.tool_choice.name = name if kind is None else ""
    if options.get("parallel_tool_calls") is False:
        chat.tool_choice.is_single = True
    if options.get("template_variables"):
        chat.template_variables = json.dumps(options["template_variables"])
    if options.get("thinking_budget") is not None:
        chat.thinking_budget = options["thinking_budget"]
