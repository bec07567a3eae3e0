"""The markups in which models write tool calls and reasoning.

Each markup is a row of a table, spelled as chat templates write it. Readers take any space around its parts; grammars
(common/chat/grammars.py) ask for exactly this spelling.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

MAX_TOOL_NAME_CHARS = 128
TOOL_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")


class Syntax(Enum):
    """How a call's name and arguments are written."""

    OBJECT = auto()
    """A JSON object of name and arguments."""
    JSON = auto()
    """A name, then its arguments as a JSON object."""
    TAGS = auto()
    """A name, then each argument in tags, with its value as plain text or JSON."""
    PYTHON = auto()
    """A list of Python calls."""
    CHANNELS = auto()
    """A message of its own, whose header names the tool and whose body is its arguments as a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Markup of one argument."""

    key: str
    """Text before its name."""
    value: str
    """Text between its name and its value; a newline at its end is not part of the value."""
    end: str
    """Text behind its value; a newline at its beginning is not part of the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    syntax: Syntax
    opening: str
    """Marker that opens calls anywhere in an answer."""
    closing: str = ""
    """Marker behind the last call, after which content may follow; empty: there is none."""
    begin: str = ""
    """Text before a call's name."""
    namespace: str = ""
    """Prefix of names that is not part of them."""
    call_id: str = ""
    """Text before a call's id, which follows the name; empty: there is none."""
    id_pattern: str = ""
    """Regular expression of ids."""
    earlier_id: str = ""
    """Id by which a template names an earlier call, made of its `{name}` and its `{number}` among all; empty: any."""
    after_name: str = ""
    """Text between a call's name, or its id, and its arguments."""
    tags: Tags | None = None
    """Markup of arguments in tags."""
    end: str = ""
    """Text behind a call's arguments."""
    separator: str = ""
    """Text between calls."""
    is_shared: bool = False
    """Whether the markers stand around all calls together, else around each one."""
    is_list: bool = False
    """Whether calls that are JSON objects stand in a list."""
    needs_special_tokens: bool = True
    """Whether markers are special tokens of usual tokenizers, so that decoding must keep special tokens."""
    bare: str = ""
    """First character of calls without a marker, which stand at the start of an answer; empty: there are none."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening marker and every other text that cannot be part of arguments in JSON."""
        tags = self.tags and (self.tags.key, self.tags.value, self.tags.end)
        texts = (self.opening, self.call_id, self.after_name, self.end, self.begin, *(tags or ()), self.closing)
        return tuple(dict.fromkeys(marker for text in texts for marker in MARKER.findall(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its thinking."""

    name: str
    open: str
    close: str
    answer: str = ""
    """Text between the thinking and what follows it."""
    content: str = ""
    """Text before content."""
    needs_special_tokens: bool = False
    """Whether the texts are special tokens of usual tokenizers."""
    in_channels: bool = False
    """Whether thoughts are messages of their own, among those of Syntax.CHANNELS."""


MARKER = re.compile(r"</?[\w:｜|▁]+>|\[/?[A-Z_]+\]")
"""Texts that tokenizers may keep apart as tokens."""


def _by_name(*formats: ToolFormat) -> Mapping[str, ToolFormat]:
    return {each.name: each for each in formats}


TOOL_FORMATS: Mapping[str, ToolFormat] = _by_name(
    # <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>
    ToolFormat(
        name="hermes",
        syntax=Syntax.OBJECT,
        opening="<tool_call>",
        begin='\n{"name": "',
        after_name='", "arguments": ',
        end="}\n",
        closing="</tool_call>",
        separator="\n",
        needs_special_tokens=False,
    ),
    # {"name": …, "parameters": {…}}; {…}
    *(
        ToolFormat(
            name=name,
            syntax=Syntax.OBJECT,
            opening="<|python_tag|>",
            begin='{"name": "',
            after_name='", "parameters": ',
            end="}",
            separator="; ",
            bare="{",
        )
        for name in ("llama3_json", "llama4_json")
    ),
    # <|tool_call|>[{"name": …, "arguments": {…}}, …]
    ToolFormat(
        name="granite",
        syntax=Syntax.OBJECT,
        opening="<|tool_call|>",
        begin='{"name": "',
        after_name='", "arguments": ',
        end="}",
        separator=", ",
        is_shared=True,
        is_list=True,
    ),
    # [TOOL_CALLS]name[ARGS]{…} or [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
    ToolFormat(
        name="mistral",
        syntax=Syntax.JSON,
        opening="[TOOL_CALLS]",
        call_id="[CALL_ID]",
        id_pattern="[a-zA-Z0-9]{9}",
        after_name="[ARGS]",
        is_list=True,
    ),
    # [f(a=1, b="x"), g()]
    *(
        ToolFormat(
            name=name,
            syntax=Syntax.PYTHON,
            opening="<|python_start|>",
            closing="<|python_end|>",
            separator=", ",
            is_shared=True,
            bare="[",
        )
        for name in ("pythonic", "llama4_pythonic")
    ),
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```<｜tool▁call▁end｜>…
    ToolFormat(
        name="deepseek_v3",
        syntax=Syntax.JSON,
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        is_shared=True,
        separator="\n",
    ),
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…
    ToolFormat(
        name="deepseek_v31",
        syntax=Syntax.JSON,
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        is_shared=True,
    ),
    # <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
    ToolFormat(
        name="kimi_k2",
        syntax=Syntax.JSON,
        opening="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>",
        namespace="functions.",
        call_id=":",
        id_pattern="[0-9]{1,4}",
        earlier_id="functions.{name}:{number}",
        after_name="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        is_shared=True,
    ),
    # <tool_call>\n<function=f>\n<parameter=a>\n…\n</parameter>\n</function>\n</tool_call>
    ToolFormat(
        name="qwen3_coder",
        syntax=Syntax.TAGS,
        opening="<tool_call>",
        begin="\n<function=",
        after_name=">\n",
        tags=Tags(key="<parameter=", value=">\n", end="\n</parameter>\n"),
        end="</function>\n",
        closing="</tool_call>",
        separator="\n",
        needs_special_tokens=False,
    ),
    # <seed:tool_call>\n<function=f>\n<parameter=a>…</parameter>\n</function>\n</seed:tool_call>
    ToolFormat(
        name="seed_oss",
        syntax=Syntax.TAGS,
        opening="<seed:tool_call>",
        begin="\n<function=",
        after_name=">\n",
        tags=Tags(key="<parameter=", value=">", end="</parameter>\n"),
        end="</function>\n",
        closing="</seed:tool_call>",
        separator="\n",
    ),
    # <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>…</arg_value>\n</tool_call>
    ToolFormat(
        name="glm45",
        syntax=Syntax.TAGS,
        opening="<tool_call>",
        after_name="\n",
        tags=Tags(key="<arg_key>", value="</arg_key>\n<arg_value>", end="</arg_value>\n"),
        closing="</tool_call>",
        separator="\n",
    ),
    # <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">…</parameter>\n</invoke>\n</minimax:tool_call>
    ToolFormat(
        name="minimax_m2",
        syntax=Syntax.TAGS,
        opening="<minimax:tool_call>",
        begin='\n<invoke name="',
        after_name='">\n',
        tags=Tags(key='<parameter name="', value='">', end="</parameter>\n"),
        end="</invoke>\n",
        closing="</minimax:tool_call>",
        is_shared=True,
    ),
    # <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    ToolFormat(
        name="gpt-oss",
        syntax=Syntax.CHANNELS,
        opening="<|start|>",
        begin="<|channel|>commentary to=",
        namespace="functions.",
        after_name=" <|constrain|>json<|message|>",
        closing="<|call|>",
    ),
)

_THINK: dict[str, Any] = {"open": "<think>", "close": "</think>"}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **{
        name: ReasoningFormat(name=name, **_THINK)
        for name in ("qwen3", "deepseek_r1", "glm45", "kimi_k2", "minimax_m2")
    },
    "seed_oss": ReasoningFormat(name="seed_oss", open="<seed:think>", close="</seed:think>"),
    "mistral": ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]", needs_special_tokens=True),
    "granite": ReasoningFormat(name="granite", open="Here is my thought process:", close="Here is my response:"),
    "gpt-oss": ReasoningFormat(
        name="gpt-oss",
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        answer="<|start|>assistant",
        content="<|channel|>final<|message|>",
        needs_special_tokens=True,
        in_channels=True,
    ),
}

_TEXTS = [each.open + each.close + each.answer + each.content for each in REASONING_FORMATS.values()]
MARKERS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            *(marker for each in TOOL_FORMATS.values() for marker in each.markers),
            *(marker for text in _TEXTS for marker in MARKER.findall(text)),
        ]
    )
)
"""Every marker of every format, for callers who look up which of them are tokens."""
