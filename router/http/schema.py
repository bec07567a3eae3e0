"""The JSON bodies of the endpoints. Types are checked here (strict.py), values for both APIs alike (validation.py)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    create_model,
)

from common.parameter import Biases, Json, Parameter, Texts, Tokens
from common.sampling import PARAMETERS
from common.structured_outputs import MAX_CHOICES
from common.wire import MAX_PROMPT_TOKENS, MAX_TOOLS
from router.http.cache_options import CacheOptions, Retention
from router.http.strict import TEXT, TEXT_OR_NULL, Strict, const_schema, list_schema, nullable, object_schema

_Tokens = Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS)]
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of a message, each with the role that the model sees."""
SILENT_ROLES = ("assistant", "tool")
"""Roles of messages that may have no content: nothing was said, or returned."""
# calls.py reads these fields by hand: their schemas are for the OpenAPI document.
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1)]
_Prompts = str | _Texts | _TokenIds | Annotated[list[_TokenIds], Field(min_length=1)]
_PARTS = list_schema(object_schema(type=const_schema("text"), text=TEXT))
MESSAGE_TEXTS = ("tool_call_id", "name", "reasoning", "reasoning_content")
"""Members of every message; null is none."""
_TOOL_CALLS = list_schema(
    object_schema(
        {"id": TEXT_OR_NULL, "type": {"enum": ["function", None]}},
        function=object_schema({"arguments": TEXT_OR_NULL}, name=TEXT),
    )
)
_MEMBERS = dict.fromkeys(MESSAGE_TEXTS, TEXT_OR_NULL)
_SAID = object_schema(
    _MEMBERS | {"tool_calls": nullable(_TOOL_CALLS)},
    role=TEXT | {"enum": list(ROLES)},
    content={"anyOf": [TEXT, _PARTS]},
)
_SILENT = object_schema(
    _MEMBERS | {"content": {"type": "null"}, "tool_calls": nullable(_TOOL_CALLS)},
    role=TEXT | {"enum": list(SILENT_ROLES)},
)
_RETURNED = object_schema(
    _MEMBERS, role=const_schema("tool"), content=list_schema({"type": "object", "properties": {"type": TEXT}})
)
Prompt = Annotated[Any, WithJsonSchema(TypeAdapter(_Prompts).json_schema())]
Messages = Annotated[Any, WithJsonSchema(list_schema({"anyOf": [_SAID, _SILENT, _RETURNED]}) | {"minItems": 1})]


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: events are never padded."""


class Extension(Strict):
    """`kvrelay`: options without a counterpart in OpenAI's API."""

    is_closed = True
    report: bool | None = None
    """Report plan, timings and transfer with the answer."""
    timeout_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


_JSON_TYPES: Mapping[Any, Any] = {
    Texts: list[str],
    Tokens: list[int],
    Biases: dict[str, float],
    Json: Annotated[dict[str, Any], Field(max_length=1)],
}
"""Types in JSON, where they differ."""
_RENAMED = frozenset(("logprobs", "prompt_logprobs", "include_special_tokens", "detokenize"))
"""OpenAI's API has other words for these, or none."""
_LOWEST: Mapping[str, int] = {"top_k": -1, "top_p": 0, "seed": -(2**63)}
"""Smallest values of options that accept more here: calls.py converts them."""

SAMPLING_FIELDS: Mapping[str, Parameter] = {each.option: each for each in PARAMETERS if each.option not in _RENAMED}
"""The sampling parameters that both generating endpoints take under their own names."""


def _sampling_field(parameter: Parameter) -> Any:
    """Return type and default of a body's field, as pydantic's `create_model` takes them."""
    json_type: Any = _JSON_TYPES.get(parameter.type, parameter.type)
    annotation: Any = Annotated[json_type, Field(max_length=parameter.max_entries)] | None
    if parameter.type == Texts:
        annotation = Annotated[annotation, BeforeValidator(_as_list, json_schema_input_type=str | annotation)]
    # The document alone states the limits: numbers are checked with the request.
    extra: dict[str, Any] = {}
    if parameter.type in (float, int):
        is_open = parameter.is_open and parameter.option not in _LOWEST
        extra["exclusiveMinimum" if is_open else "minimum"] = _LOWEST.get(parameter.option, parameter.least)
        extra["maximum"] = parameter.most
    return annotation, Field(default=None, description=parameter.meaning, json_schema_extra=extra)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def sampling_body(*without: str) -> Any:
    """Return a base of bodies, with every field of `SAMPLING_FIELDS` but some."""
    fields = {name: _sampling_field(each) for name, each in SAMPLING_FIELDS.items() if name not in without}
    return create_model("_SamplingBody", __base__=Strict, **fields)


if TYPE_CHECKING:
    _SamplingBody = Strict
else:
    _SamplingBody = sampling_body()


class GenerationBody(_SamplingBody):
    """The fields of both generating endpoints, beside those of `SAMPLING_FIELDS`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Widespread extensions.
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    """Name of the session that the request belongs to."""
    truncate_prompt_tokens: int | None = None
    kvrelay: Extension | None = None
    prompt_cache_retention: Retention = None
    """`24h` marks the end of the prompt for a day; `in_memory` is what every prompt gets."""
    prompt_cache_options: CacheOptions | None = None
    # Other names of `structured_outputs`: OpenAI's, and those of earlier versions of vLLM.
    response_format: Annotated[dict[str, Any], Field(max_length=8)] | None = None
    guided_json: Annotated[dict[str, Any], Field(max_length=1024)] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=1024)] | None = None
    """The answer is of these tokens alone."""

    def sampling_options(self) -> dict[str, Any]:
        """Return the fields of `SAMPLING_FIELDS` that are given."""
        return {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    special_tokens = True
    prompt: Prompt = None
    echo: bool | None = None
    best_of: int | None = None
    """Generate so many samples, and answer the `n` of them whose tokens are most probable in the mean."""
    logprobs: int | None = None


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})
    special_tokens = False
    messages: Messages = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[dict[str, Any], Field(max_length=8)] | str | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """`none` is the template's variable `enable_thinking: false`, any other its variable `reasoning_effort`."""
    thinking_budget: int | None = None
    """Most tokens that the model may think before it answers."""
    continue_final_message: bool | None = None
    """The answer goes on from the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """Whether the assistant's turn begins after the messages: not with `continue_final_message`."""


class TokenizeBody(Strict):
    """`/tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """`/detokenize`."""

    model: str | None = None
    tokens: _Tokens


class EmbeddingBody(Strict):
    """`/v1/embeddings`."""

    model_config = ConfigDict(json_schema_extra={"required": ["input"]})
    special_tokens = True
    input: Prompt = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keep so many leading values, before the vector is scaled to length 1."""
    pooling: Literal["last", "mean"] | None = None
    """Hidden states that the vector is made of: the last token's (default), or the mean over all tokens."""
    normalize: bool | None = None
    """Scale the vector to length 1 (default)."""
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    kvrelay: Extension | None = None
