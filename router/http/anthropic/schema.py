"""The bodies of Anthropic's endpoints, and the JSON schemas of their answers."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from common.chat.formats import TOOL_NAME
from common.sampling import PARAMETERS
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, MAX_TOOLS
from router.http.schema import Extension
from router.http.strict import TEXT, TEXT_OR_NULL, StrictBody, const_schema, list_schema, nullable, object_schema

_INT32_MAX = 2**31 - 1
_MAX_STOPS = next(each.max_entries for each in PARAMETERS if each.option == "stop")

_Ignored = Annotated[dict[str, Any], Field(max_length=64)] | None
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
"""Times of marks, seconds."""
_CONTROL = object_schema({"ttl": {"enum": [*CACHE_TTLS, None]}}, type=const_schema("ephemeral")) | {"maxProperties": 64}
_CacheControl = Annotated[dict[str, Any], Field(max_length=64), WithJsonSchema(_CONTROL)] | None
_JsonSchema = Annotated[dict[str, Any], Field(max_length=1024)]


def _block(kind: str, **members: Any) -> dict[str, Any]:
    return object_schema(type=const_schema(kind), **members)


def _blocks(*kinds: dict[str, Any]) -> dict[str, Any]:
    return list_schema({"anyOf": list(kinds)}) | {"maxItems": MAX_CONTENT_PARTS}


UNREAD_BLOCKS = (
    *("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
    *("tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction"),
)
"""Blocks of an assistant's message that another server has made for itself."""
_NOT_TEXT = TEXT | {"not": const_schema("text")}
# turns.py reads conversations by hand: these are for the OpenAPI document.
_TEXT_BLOCKS = _blocks(_block("text", text=TEXT))
_TEXTS = {"anyOf": [TEXT, _TEXT_BLOCKS]}
_RETURNED = {"anyOf": [TEXT, _blocks(_block("text", text=TEXT), object_schema(type=_NOT_TEXT))]}
_RESULT = object_schema(
    {"content": nullable(_RETURNED), "is_error": {"type": ["boolean", "null"]}},
    type=const_schema("tool_result"),
    tool_use_id=TEXT | {"minLength": 1},
)
_CALL = _block("tool_use", id=TEXT | {"minLength": 1}, name=TEXT | {"minLength": 1}, input={"type": "object"})
_ASKED = _blocks(_block("text", text=TEXT), _RESULT)
_ANSWERED = _blocks(
    _block("text", text=TEXT),
    _block("thinking", thinking=TEXT),
    _CALL,
    object_schema(type=TEXT | {"enum": list(UNREAD_BLOCKS)}),
)


def _turn(role: str, content: dict[str, Any]) -> dict[str, Any]:
    return object_schema(role=const_schema(role), content={"anyOf": [TEXT, content]})


_TURNS = list_schema({"anyOf": [_turn("user", _ASKED), _turn("assistant", _ANSWERED), _turn("system", _TEXT_BLOCKS)]})
Turns = Annotated[Any, WithJsonSchema(_TURNS | {"minItems": 1, "maxItems": MAX_CHAT_MESSAGES})]
Texts = Annotated[Any, WithJsonSchema(nullable(_TEXTS))]


class Tool(StrictBody):
    """One entry of `tools`; the model is told of those that have the type `custom`, or none."""

    type: str | None = None
    name: Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")] | None = None
    description: str | None = None
    input_schema: _JsonSchema | None = None
    cache_control: _CacheControl = None
    """A mark: the prompt up to this tool is to stay cached."""
    eager_input_streaming: bool | None = None
    """Ignored: input is always streamed while it is generated."""
    strict: bool | None = None
    """Ignored: input of calls that have to be made always fits its schema."""


def _own_or_bare(tool: Any) -> Any:
    """Return a tool; one that the model is not told of without anything but its type and its mark."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return tool
    return {name: tool[name] for name in ("type", "cache_control") if name in tool}


class ToolChoice(StrictBody):
    """`tool_choice`."""

    is_closed = True
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    """The tool to call, with `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictBody):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Most tokens that the model may think, with `enabled`."""
    display: str | None = None
    """Ignored: thoughts are shown as they are."""


class OutputFormat(StrictBody):
    """What the answer has to look like."""

    is_closed = True
    type: Literal["json_schema"]
    json_schema: _JsonSchema = Field(alias="schema")


class OutputConfig(StrictBody):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Ignored: models know other efforts, or none."""


class CountTokensBody(StrictBody):
    """`/v1/messages/count_tokens`: a conversation."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})
    ignored = frozenset(("context_management", "speed"))
    model: str | None = None
    messages: Turns = None
    system: Texts = None
    tools: Annotated[list[Annotated[Tool, BeforeValidator(_own_or_bare)]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Earlier name of `output_config.format`."""
    cache_control: _CacheControl = None
    """A mark at the end of the prompt: all of it is to stay cached."""


class MessagesBody(CountTokensBody):
    """`/v1/messages`: a conversation, and how to answer it."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages", "max_tokens"]})
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)]
    """With 0 the prompt is only put into the cache."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: _Ignored = None
    """`user_id` names the session; the rest is ignored."""
    service_tier: str | None = None
    """Ignored."""
    # Not in Anthropic's API.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    kvrelay: Extension | None = None


_COUNT = {"type": "integer", "minimum": 0}
SCHEMAS: dict[str, dict[str, Any]] = {
    "AnthropicError": object_schema(
        type=const_schema("error"), error=object_schema(type=TEXT, message=TEXT, param=TEXT_OR_NULL)
    ),
    "Message": object_schema(
        id=TEXT,
        type=const_schema("message"),
        role=const_schema("assistant"),
        model=TEXT,
        content=list_schema(
            {
                "anyOf": [
                    _block("thinking", thinking=TEXT, signature=TEXT),
                    _block("text", text=TEXT),
                    _block("tool_use", id=TEXT, name=TEXT, input={"type": "object"}),
                ]
            }
        ),
        stop_reason=TEXT,
        stop_sequence=TEXT_OR_NULL,
        usage=object_schema(
            input_tokens=_COUNT,
            output_tokens=_COUNT,
            cache_read_input_tokens=_COUNT,
            cache_creation_input_tokens=_COUNT,
            cache_creation=object_schema(**{f"ephemeral_{each}_input_tokens": _COUNT for each in CACHE_TTLS}),
        ),
    ),
    "TokenCount": object_schema(input_tokens=_COUNT),
}
"""Schemas of the answers and of their errors."""
