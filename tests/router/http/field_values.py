"""Values of every field of the APIs, by which field_table.py finds out what the door does with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Values:
    """What is sent as one field."""

    sensible: Any
    """A value that a user would send, and that changes an answer, where any value does."""
    others: tuple[Any, ...] = ()
    """Well-formed values that show that a field without a visible effect is read: out of bounds, for example."""
    default: tuple[Any, ...] = ()
    """Values that ask for nothing, for a field that may have no other; beside those of the OpenAPI document."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Fields without which this one has no meaning."""


PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": PLACE | {"additionalProperties": False}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
STREAM = {"stream": True}
FORCED = {"tools": TOOLS, "tool_choice": "required"}
BEAMS = {"use_beam_search": True, "n": 2}
BEGUN = {"messages": [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "Rivers are"}]}
IMAGE_USER = {"type": "approximate", "approximate": {"country": "FR"}}

SAMPLING: dict[str, Values] = {
    "temperature": Values(0.1),
    "top_k": Values(2),
    "top_p": Values(0.05),
    "min_p": Values(0.9),
    "repetition_penalty": Values(5.0),
    "presence_penalty": Values(2.0),
    "frequency_penalty": Values(2.0),
    "logit_bias": Values({"65": 100}),
    "seed": Values(2),
    "n": Values(2),
    "stop": Values(["a", "b", "c"]),
    "stop_token_ids": Values(list(range(65, 100))),
    "max_tokens": Values(3),
    "min_tokens": Values(9),
    "ignore_eos": Values(True),
    "structured_outputs": Values({"regex": "[ab]{3}"}),
    "use_beam_search": Values(True, beside={"n": 2}),
    "length_penalty": Values(4.0, beside=BEAMS),
    "early_stopping": Values(True, beside=BEAMS),
}
EXTENSION: dict[str, Values] = {
    "kvrelay": Values({"report": True}),
    "kvrelay.report": Values(True),
    "kvrelay.timeout_s": Values(30.0, (-1.0,)),
    "kvrelay.ttft_s": Values(1.0, (-1.0,)),
    "kvrelay.tpot_s": Values(0.1, (-1.0,)),
}
SHARED: dict[str, Values] = {
    "model": Values("fake", ("no such model",)),
    "stream": Values(True),
    "priority": Values(1, (1 << 40,)),
    "add_special_tokens": Values(True, (False,)),
    "user": Values("somebody"),
    "metadata": Values({"a": "b"}),
    "store": Values(True),
    "safety_identifier": Values("somebody"),
    "service_tier": Values("flex"),
    "request_id": Values("mine"),
    "prompt_cache_key": Values("mine"),
    "prompt_cache_retention": Values("24h"),
    "prompt_cache_options": Values({"mode": "implicit"}),
    "prompt_cache_options.mode": Values("implicit"),
    "prompt_cache_options.ttl": Values("30m"),
    "prompt_cache_options.prewarm": Values(False, (True,)),
    "prompt_cache_options.comparison_response_id": Values("resp_1"),
    "moderation": Values({"model": "omni-moderation-latest"}),
    "reasoning_effort": Values("low"),
    "verbosity": Values("low"),
}
GENERATION: dict[str, Values] = {
    **SAMPLING,
    **EXTENSION,
    **SHARED,
    "stream_options": Values({"include_usage": True}, beside=STREAM),
    "stream_options.include_usage": Values(True, beside=STREAM),
    "stream_options.continuous_usage_stats": Values(True, beside=STREAM),
    "stream_options.include_obfuscation": Values(True, beside=STREAM),
    "skip_special_tokens": Values(False),
    "return_token_ids": Values(True),
    "response_format": Values({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}),
    "guided_json": Values({"type": "boolean"}),
    "guided_regex": Values("[ab]{3}"),
    "guided_choice": Values(["a", "b"]),
    "guided_grammar": Values('start: "a" | "b"'),
    "tools": Values(TOOLS),
    "tool_choice": Values("required", beside={"tools": TOOLS}),
    "parallel_tool_calls": Values(False, beside=FORCED),
    "functions": Values([FUNCTION]),
    "function_call": Values({"name": "get_weather"}),
    "chat_template": Values("{{ messages }}"),
    "chat_template_kwargs": Values({"enable_thinking": False}, ({"messages": []},)),
    "thinking_budget": Values(3),
    "audio": Values({"format": "wav", "voice": "alloy"}),
    "modalities": Values(["text", "audio"]),
    "prediction": Values({"type": "content", "content": "a"}),
    "web_search_options": Values({"user_location": IMAGE_USER}),
    "add_generation_prompt": Values(False),
    "continue_final_message": Values(True),
    "documents": Values([{"title": "a", "text": "b"}]),
    "mm_processor_kwargs": Values({"a": 1}),
    "spaces_between_special_tokens": Values(False),
    "include_stop_str_in_output": Values(True),
    "truncate_prompt_tokens": Values(3),
    "prompt_logprobs": Values(1),
    "allowed_token_ids": Values([65]),
    "bad_words": Values(["a"]),
    "logits_processors": Values(["a"]),
    "cache_salt": Values("salt"),
    "suffix": Values("end"),
    "echo": Values(True),
    "best_of": Values(3),
}
CHAT: dict[str, Values] = {
    **GENERATION,
    "messages": Values([{"role": "user", "content": "Another question"}]),
    "max_completion_tokens": Values(9, (3,)),
    "logprobs": Values(True),
    "top_logprobs": Values(2, beside={"logprobs": True}),
    "continue_final_message": Values(True, beside=BEGUN),
    "add_generation_prompt": Values(False, ("no",), beside={**BEGUN, "continue_final_message": True}),
}
COMPLETIONS: dict[str, Values] = {
    **GENERATION,
    "prompt": Values("Another text"),
    "logprobs": Values(2),
    **{name: Values(GENERATION[name].sensible) for name in ("tool_choice", "parallel_tool_calls")},
}
RESPONSES: dict[str, Values] = {
    **GENERATION,
    "input": Values("Another question"),
    "instructions": Values("Be brief."),
    "max_output_tokens": Values(3),
    "text": Values({"format": {"type": "json_object"}}),
    "text.format": Values({"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}),
    "text.verbosity": Values("low", default=("medium",)),
    "reasoning": Values({"effort": "low"}),
    "reasoning.effort": Values("low"),
    "reasoning.context": Values("all_turns", default=("auto",)),
    "reasoning.mode": Values("pro", default=("standard",)),
    "reasoning.summary": Values("detailed"),
    "reasoning.generate_summary": Values("detailed"),
    "tools": Values(FLAT_TOOLS),
    "tool_choice": Values("required", beside={"tools": FLAT_TOOLS}),
    "parallel_tool_calls": Values(False, beside={"tools": FLAT_TOOLS, "tool_choice": "required"}),
    "include": Values(["message.output_text.logprobs"]),
    "top_logprobs": Values(2, beside={"include": ["message.output_text.logprobs"]}),
    "stream_options": Values({"include_obfuscation": True}, beside=STREAM),
    "client_metadata": Values({"a": "b"}),
    "max_tool_calls": Values(1),
    "previous_response_id": Values("resp_1"),
    "conversation": Values("conv_1"),
    "background": Values(True),
    "background_options": Values({"completion_window": "soonest"}),
    "prompt": Values({"id": "pmpt_1"}),
    "truncation": Values("auto"),
    "context_management": Values([{"type": "compaction"}]),
    "access_programs": Values({"cyber": "standard"}),
    "image": Values({"context_compression": "auto"}),
    "messages": Values([{"role": "user", "content": "a"}]),
    "max_completion_tokens": Values(3),
    "max_tokens": Values(3),
    "use_beam_search": Values(True),
    "length_penalty": Values(4.0),
    "early_stopping": Values(True),
}
EMBEDDINGS: dict[str, Values] = {
    **{name: Values(each.sensible) for name, each in GENERATION.items() if not name.startswith("kvrelay")},
    **EXTENSION,
    "kvrelay.tpot_s": Values(0.1),
    "model": SHARED["model"],
    "priority": SHARED["priority"],
    "add_special_tokens": SHARED["add_special_tokens"],
    "input": Values("Another text"),
    "encoding_format": Values("base64"),
    "dimensions": Values(2),
    "pooling": Values("mean"),
    "normalize": Values(False),
}
ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}]
COUNT_TOKENS: dict[str, Values] = {
    "model": SHARED["model"],
    "messages": Values([{"role": "user", "content": "Another question"}]),
    "system": Values("Be brief."),
    "tools": Values(ANTHROPIC_TOOLS),
    "tool_choice": Values({"type": "any"}, ({"type": "tool", "name": "no_such"},), beside={"tools": ANTHROPIC_TOOLS}),
    "thinking": Values({"type": "enabled", "budget_tokens": 1024}),
    "output_config": Values({"format": {"type": "json_schema", "schema": PLACE}}, ({"format": {"type": "xml"}},)),
    "output_config.format": Values({"type": "json_schema", "schema": PLACE}, ({"type": "xml"},)),
    "output_config.effort": Values("low"),
    "context_management": Values({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "output_config.task_budget": Values({"type": "tokens", "total": 20000}),
    "output_format": Values({"type": "json_schema", "schema": PLACE}, ({"type": "xml"},)),
    "cache_control": Values({"type": "ephemeral"}),
    "speed": Values("fast"),
    "user_profile_id": Values("somebody"),
    "workspace_id": Values("mine"),
}
MESSAGES: dict[str, Values] = {
    **COUNT_TOKENS,
    **{name: SAMPLING[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")},
    **EXTENSION,
    "stream": Values(True),
    "stop_sequences": Values(["a", "b", "c"]),
    "metadata": Values({"user_id": "somebody"}),
    "service_tier": Values("auto"),
    "container": Values("container_1"),
    "diagnostics": Values({"previous_message_id": "msg_1"}),
    "inference_geo": Values("us"),
}
