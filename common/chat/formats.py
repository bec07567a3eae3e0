"""The markups in which models write tool calls and reasoning, and which of them a chat template asks for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_TOOL_NAME_CHARS = 128
TOOL_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """Every marker; the first one opens calls anywhere in an answer."""
    needs_special_tokens: bool
    """Whether markers are special tokens of usual tokenizers, so that decoding must keep special tokens."""
    closing: str = ""
    """Marker behind the last call, after which content may follow; empty: there is none."""
    bare: str = ""
    """First character of calls without a marker, which stand at the start of an answer; empty: there are none."""

    @property
    def opening(self) -> str:
        """Marker that opens calls."""
        return self.markers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its thinking."""

    name: str
    open: str
    close: str


def _by_name(*formats: ToolFormat) -> Mapping[str, ToolFormat]:
    return {each.name: each for each in formats}


TOOL_FORMATS: Mapping[str, ToolFormat] = _by_name(
    # <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
    ToolFormat(
        name="hermes",
        markers=("<tool_call>", "</tool_call>"),
        needs_special_tokens=False,
        closing="</tool_call>",
    ),
    # {"name": …, "parameters": {…}}; {…}
    ToolFormat(name="llama3_json", markers=("<|python_tag|>",), needs_special_tokens=True, bare="{"),
    # [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[ARGS]{…}
    ToolFormat(name="mistral", markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), needs_special_tokens=True),
    # [f(a=1, b="x"), g()]
    ToolFormat(
        name="pythonic",
        markers=("<|python_start|>", "<|python_end|>"),
        needs_special_tokens=True,
        closing="<|python_end|>",
        bare="[",
    ),
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```<｜tool▁call▁end｜>…
    ToolFormat(
        name="deepseek",
        markers=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        needs_special_tokens=True,
        closing="<｜tool▁calls▁end｜>",
    ),
)

_THINK = {"open": "<think>", "close": "</think>"}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    name: ReasoningFormat(name=name, **_THINK) for name in ("qwen3", "deepseek_r1")
}

MARKERS: tuple[str, ...] = (
    *(marker for each in TOOL_FORMATS.values() for marker in each.markers),
    *_THINK.values(),
)
"""Every marker of every format, for callers who look up which of them are tokens."""


def detect_tool_format(template_source: str) -> str | None:
    """Return the name of the format in which a chat template writes tool calls; None for no known one."""
    source = template_source.replace('\\"', '"')
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<function=" in source or "<arg_key>" in source:  # Qwen3-Coder, Functionary, GLM: other markups inside
        return None
    if "<tool_call>" in source and "<tool_calls>" not in source and '"arguments"' in source:
        return "hermes"
    if "<|python_start|>" in source or "func_name1(" in source:
        return "pythonic"
    if "<|python_tag|>" in source or '"parameters": dictionary of argument name' in source:
        return "llama3_json"
    return None


def detect_reasoning_format(template_source: str) -> str | None:
    """Return the name of the format in which a chat template writes reasoning; None when it knows none."""
    if "</think>" not in template_source and "<think>" not in template_source:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template_source else "qwen3"


def starts_in_reasoning(rendered_prompt: str) -> bool:
    """Return whether an answer to this prompt begins with thinking, because the prompt ends with an open think tag."""
    return rendered_prompt.rstrip().endswith(_THINK["open"])


def begun_answer(rendered_prompt: str, answer: Mapping[str, str]) -> str:
    """Return a prompt with the assistant's message that the answer goes on from.

    Thoughts that the prompt has opened are those of the message, and over once it has content.
    """
    content = answer["content"]
    if content and starts_in_reasoning(rendered_prompt):
        rendered_prompt += f"{answer.get('reasoning_content', '')}\n{_THINK['close']}\n\n"
    return rendered_prompt + content
