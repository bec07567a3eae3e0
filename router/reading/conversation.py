"""Reads conversations: messages, tools, what has to be called, and how the answer will be written.

What a tool choice or a thinking budget demands of the answer becomes a grammar, which is a sampling parameter: an
answer that another worker continues is bound by the same rules.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from common.chat.detection import detect_reasoning_format, detect_tool_format, starts_in_reasoning
from common.chat.formats import MARKERS, MAX_TOOL_NAME_CHARS, REASONING_FORMATS, TOOL_FORMATS, TOOL_NAME
from common.chat.grammars import after_reasoning, limited_reasoning, structure_lark, tool_grammar
from common.chat.parameter_types import parameter_types, read_parameter_types
from common.chat_template import Conversation
from common.config import ModelConfig
from common.errors import InvalidRequest
from common.sampling import SamplingParams
from common.structured_outputs import MAX_DEPTH, depth_of, read_structure, structure_text
from kvrelay.v1 import inference_pb2 as pb
from router.reading.codec import Codec

MAX_TOOLS_CHARS = 1 << 18
"""Most characters of all tools together: the event loop reads so many in some ten milliseconds."""
MAX_GRAMMAR_CHARS = 200_000
"""Bound of grammars made here, below that of `structured_outputs` in JSON."""
_FORCED = (pb.TOOL_CHOICE_KIND_REQUIRED, pb.TOOL_CHOICE_KIND_NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormats:
    """Names of the markup in which a model writes calls of tools and reasoning; empty: it has none."""

    tools: str = ""
    reasoning: str = ""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Parts of the markup that are tokens."""

    @classmethod
    def of(cls, model: ModelConfig, codec: Codec) -> "ChatFormats":
        """Return the configured formats; `auto` ones are those of the chat template."""
        source = codec.template_source or ""
        found = {
            "tools": (model.tool_parser, detect_tool_format(source)),
            "reasoning": (model.reasoning_parser, detect_reasoning_format(source)),
        }
        names = {
            name: (detected or "") if given == "auto" else "" if given == "none" else given
            for name, (given, detected) in found.items()
        }
        ids = {marker: token_id for marker in MARKERS if (token_id := codec.token_id(marker)) is not None}
        return cls(**names, token_ids=ids)


NO_FORMATS = ChatFormats()
"""Those of a model that has no markup."""


def read_conversation(chat: pb.ChatPrompt, formats: ChatFormats = NO_FORMATS) -> Conversation:
    """Return what the template renders. Raises InvalidRequest that names the field."""
    num_chars = sum(map(len, chat.tools)) + len(chat.template_variables)
    if num_chars > MAX_TOOLS_CHARS:
        raise InvalidRequest(
            f"tools and template variables have {num_chars} characters; at most {MAX_TOOLS_CHARS} are taken",
            field="chat.tools" if chat.tools else "chat.template_variables",
        )
    messages = _messages(chat, formats)
    begun = _begun(messages.pop()) if chat.continue_final_message and messages else None
    return Conversation(
        messages=_with_one_system_message(messages),
        begun=begun,
        tools=_tools(chat.tools),
        variables=_json_object(chat.template_variables, "chat.template_variables") if chat.template_variables else {},
        num_chars=num_chars + sum(map(num_chars_of, chat.messages)),
    )


def _begun(message: dict[str, Any]) -> dict[str, Any]:
    """Return the last message of a conversation, which its answer goes on from. Raises InvalidRequest."""
    if message["role"] != "assistant" or "tool_calls" in message:
        raise InvalidRequest(
            "only a message of the assistant's without calls can be continued", field="chat.continue_final_message"
        )
    return message


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with those of the system that they begin with as one, which is what models know."""
    said = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(said) < 2:
        return messages
    content = "\n\n".join(message["content"] for message in said if message["content"])
    return [{"role": "system", "content": content}, *messages[len(said) :]]


def num_chars_of(message: pb.ChatMessage) -> int:
    """Return the characters of a message's texts."""
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls)


def answer_format(
    chat: pb.ChatPrompt, conversation: Conversation, formats: ChatFormats, *, prompt_end: str
) -> pb.AnswerFormat:
    """Return how the answer to a chat is written, whose rendered prompt ends with `prompt_end`.

    `conversation` is the chat as it was read. Raises InvalidRequest for what the model has no markup for.
    """
    choice, reasoning = chat.tool_choice, formats.reasoning
    if choice.kind in _FORCED and not conversation.tools:
        raise InvalidRequest("tool_choice needs tools of type function", field="chat.tool_choice")
    wants_tools = bool(conversation.tools) and choice.kind != pb.TOOL_CHOICE_KIND_NONE
    is_named = choice.kind == pb.TOOL_CHOICE_KIND_NAMED
    if wants_tools and not formats.tools and not is_named:
        raise InvalidRequest(
            "the model's chat template takes no tools: name one in tool_choice, or set model.tool_parser",
            field="chat.tools",
        )
    has_begun = conversation.begun is not None and bool(conversation.begun["content"])
    if reasoning and (has_begun or prompt_end.rstrip().endswith(REASONING_FORMATS[reasoning].close)):
        reasoning = ""  # the thoughts are over
    has_plain_values = wants_tools and bool(formats.tools) and TOOL_FORMATS[formats.tools].tags is not None
    functions = [tool["function"] for tool in conversation.tools]
    return pb.AnswerFormat(
        tools=formats.tools if wants_tools else "",
        reasoning=reasoning,
        in_reasoning=bool(reasoning) and starts_in_reasoning(prompt_end),
        forced_name=choice.name if is_named and not formats.tools else "",
        parameter_types=parameter_types(functions) if has_plain_values else "",
    )


def checked_format(given: pb.AnswerFormat) -> pb.AnswerFormat:
    """Return the format in which another router began an answer. Raises InvalidRequest."""
    if given.tools and given.tools not in TOOL_FORMATS:
        raise InvalidRequest(f"{given.tools[:40]!r} is not a format of tool calls", field="resume.answer_format.tools")
    if given.reasoning and given.reasoning not in REASONING_FORMATS:
        raise InvalidRequest(
            f"{given.reasoning[:40]!r} is not a format of thoughts", field="resume.answer_format.reasoning"
        )
    try:
        read_parameter_types(given.parameter_types)
    except ValueError as error:
        raise InvalidRequest(str(error), field="resume.answer_format.parameter_types") from None
    return given


def shaped(
    sampling: SamplingParams,
    chat: pb.ChatPrompt,
    tools: Sequence[Mapping[str, Any]],
    answer: pb.AnswerFormat,
    formats: ChatFormats,
) -> SamplingParams:
    """Return the sampling of an answer that keeps to the tool choice and the thinking budget. Raises InvalidRequest.

    `tools`: those of the chat, as they were read.
    """
    try:
        grammar = _grammar(sampling, chat, tools, answer, formats)
    except ValueError as error:
        raise InvalidRequest(f"cannot shape the answer: {error}", field=_shape_field(sampling, chat)) from None
    if grammar is not None and len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"what the answer has to follow is a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are"
            " taken: name one tool, or send smaller schemas",
            field=_shape_field(sampling, chat),
        )
    keeps_special = any(
        formats[name].needs_special_tokens
        for name, formats in ((answer.tools, TOOL_FORMATS), (answer.reasoning, REASONING_FORMATS))
        if name
    )
    return replace(
        sampling,
        structured_outputs=sampling.structured_outputs if grammar is None else structure_text({"grammar": grammar}),
        include_special_tokens=sampling.include_special_tokens or keeps_special,
    )


def _shape_field(sampling: SamplingParams, chat: pb.ChatPrompt) -> str:
    """Return the field that asks for the shape of an answer."""
    if chat.tool_choice.kind in _FORCED:
        return "chat.tools"
    return "sampling.structured_outputs" if sampling.structured_outputs else "chat"


def _grammar(
    sampling: SamplingParams,
    chat: pb.ChatPrompt,
    tools: Sequence[Mapping[str, Any]],
    answer: pb.AnswerFormat,
    formats: ChatFormats,
) -> str | None:
    """Return the Lark grammar that the answer has to follow, None if the sampling parameters suffice.

    Raises InvalidRequest, and ValueError for what the model has no tokens for.
    """
    grammar = None
    if chat.tool_choice.kind in _FORCED:
        if sampling.structured_outputs:
            raise InvalidRequest("structured_outputs and a forced tool exclude each other", field="chat.tool_choice")
        grammar = _forced_calls(chat.tool_choice, tools, answer.tools or None, formats.token_ids)
    if not answer.reasoning:
        return grammar
    budget = chat.thinking_budget if chat.HasField("thinking_budget") else None
    tags = REASONING_FORMATS[answer.reasoning]
    if chat.soft_thinking_budget and not {tags.open, tags.close} <= formats.token_ids.keys():
        budget = None
    if grammar is None and sampling.structured_outputs:
        grammar = structure_lark(read_structure(sampling.structured_outputs))
    rest: dict[str, Any] = {"in_reasoning": answer.in_reasoning, "token_ids": formats.token_ids}
    if grammar is not None:
        is_content = chat.tool_choice.kind not in _FORCED
        return after_reasoning(grammar, answer.reasoning, is_content=is_content, max_tokens=budget, **rest)
    return None if budget is None else limited_reasoning(answer.reasoning, max_tokens=budget, **rest)


def _forced_calls(
    choice: pb.ToolChoice,
    tools: Sequence[Mapping[str, Any]],
    tool_format: str | None,
    token_ids: Mapping[str, int],
) -> str:
    name = choice.name if choice.kind == pb.TOOL_CHOICE_KIND_NAMED else None
    if name is not None and name not in {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(
            f"tool_choice names {name[:MAX_TOOL_NAME_CHARS]!r}, which is not among the tools", field="chat.tool_choice"
        )
    # Clients that name a tool read one call, as OpenAI's API promises; some raise on a second one.
    may_repeat = name is None and not choice.is_single
    return tool_grammar(tool_format, tools, name=name, parallel=may_repeat, token_ids=token_ids)


def _messages(chat: pb.ChatPrompt, formats: ChatFormats) -> list[dict[str, Any]]:
    """Return the messages, with ids of calls as the model's format wants them."""
    made = [_message(each) for each in chat.messages]
    pattern = TOOL_FORMATS[formats.tools].earlier_id if formats.tools else ""
    if not pattern:
        return made
    ids: dict[str, str] = {}  # clients may use an id again in a later turn
    num_calls = 0
    for message in made:
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = pattern.format(name=call["function"]["name"], number=num_calls)
            call["id"] = ids[call["id"]]
            num_calls += 1
        if (result_of := message.get("tool_call_id")) in ids:
            message["tool_call_id"] = ids[result_of]
    return made


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """Return a message in the form of Hugging Face's templates, without the members that are not set."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for name, member in (("tool_call_id", "tool_call_id"), ("reasoning", "reasoning_content"), ("name", "name")):
        if value := getattr(message, name):
            made[member] = value
    return made


def num_tools(texts: Sequence[str]) -> int:
    """Return how many of these tools, which were read before, the model is told of."""
    return len(_tools(texts))


def _tools(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the checked functions, without members that are null; tools of other types are left out.

    Raises InvalidRequest.
    """
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for position, text in enumerate(texts):
        where = f"chat.tools[{position}]"
        tool = _json_object(text, where)
        kind, function = tool.get("type"), tool.get("function")
        if isinstance(kind, str) and kind != "function":
            continue
        if kind != "function" or not isinstance(function, dict):
            raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{…}}}}', field=where)
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name must be 1 to {MAX_TOOL_NAME_CHARS} of A-Z a-z 0-9 _ . -", field=where
            )
        if name in names:
            raise InvalidRequest(f"{where}.function.name {name} comes twice", field=where)
        names.add(name)
        function = _without_nulls(function)
        parameters = function.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", field=where)
        if parameters:
            function["parameters"] = _without_nulls(parameters)  # some languages write an empty list as null
        tools.append(tool | {"function": function})
    return tools


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    if depth_of(value) > MAX_DEPTH:
        raise InvalidRequest(f"{field} has more than {MAX_DEPTH} levels", field=field)
    return value
