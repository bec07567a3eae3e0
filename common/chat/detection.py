"""Tells from a chat template in which markup its model writes tool calls and reasoning."""

from collections.abc import Mapping

from common.chat.formats import REASONING_FORMATS

_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>commentary", "<|message|>"), ()),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("seed_oss", ("<seed:tool_call>",), ()),
    ("kimi_k2", ("<|tool_calls_section_begin|>",), ()),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("glm45", ("<arg_key>", "<tool_call>"), ("<tool_calls>",)),
    ("qwen3_coder", ("<function=", "<parameter=", "<tool_call>"), ()),
    ("hermes", ("<tool_call>", '"arguments"'), ("<tool_calls>", "<function=", "<arg_key>")),
    ("granite", ("<|tool_call|>",), ("<|/tool_call|>",)),
    ("pythonic", ("<|python_start|>",), ()),
    ("pythonic", ("func_name1(",), ()),
    ("llama3_json", ("<|python_tag|>",), ("<function=",)),
    ("llama3_json", ('"parameters": dictionary of argument name',), ("<function=",)),
)
"""Formats with texts that a template must have and others that it must not have; the first one that fits counts."""

_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("gpt-oss", "<|channel|>analysis"),
    ("seed_oss", "<seed:think>"),
    ("mistral", "[THINK]"),
    ("granite", "Here is my thought process:"),
)
_THINK_SIGNS: tuple[tuple[str, str], ...] = (
    ("deepseek_r1", "<｜Assistant｜>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("kimi_k2", "<|im_middle|>"),
    ("glm45", "<arg_key>"),
    ("qwen3", ""),
)
"""Formats of templates that have the tag `<think>`, by another text in them."""


def detect_tool_format(template_source: str) -> str | None:
    """Return the name of the format in which a chat template writes tool calls; None for no known one."""
    source = template_source.replace('\\"', '"')
    for name, signs, others in _TOOL_SIGNS:
        if all(sign in source for sign in signs) and not any(other in source for other in others):
            return name
    return None


def detect_reasoning_format(template_source: str) -> str | None:
    """Return the name of the format in which a chat template writes reasoning; None when it knows none."""
    thinks = "<think>" in template_source or "</think>" in template_source
    for name, sign in (*_REASONING_SIGNS, *(_THINK_SIGNS if thinks else ())):
        if sign in template_source:
            return name
    return None


def starts_in_reasoning(rendered_prompt: str) -> bool:
    """Return whether an answer to this prompt begins with thinking, because the prompt ends with an open think tag."""
    return any(_ends_with(rendered_prompt, each.open) for each in REASONING_FORMATS.values())


def begun_answer(rendered_prompt: str, answer: Mapping[str, str]) -> str:
    """Return a prompt with the assistant's message that the answer goes on from.

    Thoughts that the prompt has opened are those of the message, and over once it has content.
    """
    content = answer["content"]
    for each in REASONING_FORMATS.values():
        if content and _ends_with(rendered_prompt, each.open):
            rendered_prompt += f"{answer.get('reasoning_content', '')}\n{each.close}\n\n"
        elif content and each.answer and _ends_with(rendered_prompt, each.answer):
            rendered_prompt += each.content
    return rendered_prompt + content


def _ends_with(rendered_prompt: str, tag: str) -> bool:
    return rendered_prompt.rstrip().endswith(tag)
