"""The body of `/v1/responses`: types are checked here, the items of `input` in items.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from common.sampling import MAX_LOGPROBS
from common.wire import MAX_TOOLS
from router.http.cache_options import CacheOptions, Retention
from router.http.schema import SAMPLING_FIELDS, Extension, GenerationBody, sampling_body
from router.http.strict import TEXT, Strict, const_schema, list_schema, nullable, object_schema

LOGPROBS = "message.output_text.logprobs"
INPUT_ROLES = ("system", "developer", "user", "assistant")
REASONING_TEXTS = {"content": "reasoning_text", "summary": "summary_text"}
"""Members of a reasoning item, the one that counts first, each with the type of its parts."""
UNREAD_ITEMS = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "compaction"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "tool_search_call", "tool_search_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
)
"""Items about tools that are no functions: no answer of this server has one."""
_MAX_METADATA = 16
MAX_LABEL_CHARS = 4096
_Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
"""Text that says nothing to the model and is repeated with several events of a stream."""
_STATELESS = "nothing is stored here: send the whole conversation in input"
_UNLIKE_CHAT = ("n", "max_tokens", "use_beam_search", "length_penalty", "early_stopping")
"""Sampling fields of chats that this endpoint does not have, or has under another name."""


def _kind(kind: str, /, **members: Any) -> dict[str, Any]:
    return object_schema(type=const_schema(kind), **members)


# items.py reads these by hand: their schemas are for the OpenAPI document.
_PARTS = list_schema(object_schema(type=TEXT | {"enum": ["input_text", "output_text"]}, text=TEXT))
_CONTENT = {"anyOf": [TEXT, _PARTS]}
_RETURNED = {"anyOf": [TEXT, _PARTS, list_schema(object_schema(type=TEXT))]}
_MESSAGE = object_schema(
    {"type": {"enum": ["message", None]}}, role=TEXT | {"enum": list(INPUT_ROLES)}, content=_CONTENT
)
_REASONING = object_schema(
    {name: nullable(list_schema(_kind(kind, text=TEXT))) for name, kind in REASONING_TEXTS.items()},
    type=const_schema("reasoning"),
)
_ITEMS = {
    "anyOf": [
        _MESSAGE,
        _kind("function_call", call_id=TEXT, name=TEXT, arguments=TEXT),
        object_schema({"output": nullable(_RETURNED)}, type=const_schema("function_call_output"), call_id=TEXT),
        _REASONING,
        object_schema(type=TEXT | {"enum": list(UNREAD_ITEMS)}),
    ]
}
Input = Annotated[Any, WithJsonSchema({"anyOf": [TEXT, list_schema(_ITEMS) | {"minItems": 1}]})]
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {"anyOf": [_kind("function", name=TEXT), object_schema(type=TEXT | {"not": const_schema("function")})]}
    ),
]


class TextOptions(Strict):
    """`text`."""

    format: Annotated[dict[str, Any], Field(max_length=8)] | None = None
    """What the answer has to look like: `text`, `json_object` or `json_schema`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored, and repeated in the answer."""


class ReasoningOptions(Strict):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """`none` switches the thinking off where the chat template can; others are its variable `reasoning_effort`."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: reasoning is returned in full."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored, like `summary`."""


class EventOptions(Strict):
    """`stream_options`."""

    include_obfuscation: bool | None = None
    """Ignored: events are never padded."""


if TYPE_CHECKING:
    _Sampling = Strict
else:
    _Sampling = sampling_body(*_UNLIKE_CHAT)


class ResponsesBody(_Sampling):
    """`/v1/responses`, beside the fields of `SAMPLING_FIELDS`."""

    model_config = ConfigDict(json_schema_extra={"required": ["input"]})
    special_tokens = False
    ignored = frozenset(
        (
            *("service_tier", "request_id", "client_metadata", "max_tool_calls"),
            "verbosity",
        )
    )
    only_as: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(GenerationBody.model_fields, ()),  # those of the other endpoints that this one does not have
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
        "context_management": ([],),
        "moderation": (),
        "messages": (),
        "n": (1,),
        "max_completion_tokens": (),
        "reasoning_effort": (),
        "use_beam_search": (False,),
        "bad_words": ([],),
        "include_stop_str_in_output": (False,),
        "continue_final_message": (False,),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": _STATELESS,
        "prompt": _STATELESS,
        "truncation": "a prompt that is too long is refused",
        "messages": "here it is input",
        "max_tokens": "here it is max_output_tokens",
        "max_completion_tokens": "here it is max_output_tokens",
        "response_format": "here it is text.format",
        "reasoning_effort": "here it is reasoning.effort",
    }

    model: str | None = None
    input: Input = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[dict[str, Any], Field(max_length=8)] | str | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    """Others than the log-probabilities are ignored: reasoning is never encrypted, its items hold the text."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    store: bool | None = None
    """Ignored: nothing is stored."""
    # Repeated in the answer.
    metadata: Annotated[dict[_Label, _Label], Field(max_length=_MAX_METADATA)] | None = None
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: Retention = None
    """`24h` marks the end of the prompt for a day; `in_memory` is what every prompt gets."""
    prompt_cache_options: CacheOptions | None = None
    # Widespread extensions.
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    thinking_budget: int | None = None
    """Most tokens that the model may think before it answers."""
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    kvrelay: Extension | None = None

    def sampling_options(self) -> dict[str, Any]:
        """Return the sampling fields that are given."""
        names = [name for name in SAMPLING_FIELDS if name not in _UNLIKE_CHAT]
        return {name: value for name in names if (value := getattr(self, name)) is not None}
