"""Answers as each family of models writes them, and templates in the structure of the published ones."""

import json
from typing import Any

from common.chat.parameter_types import parameter_types

TOOLS: list[dict[str, Any]] = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "word": {"$ref": "#/$defs/word"},
                "count": {"type": "integer"},
                "ratio": {"type": ["number", "null"]},
                "sure": {"type": "boolean"},
                "where": {"type": "object"},
                "days": {"type": "array"},
            },
            "$defs": {"word": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        },
    },
    {"name": "g.h-1"},
    {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}},
]
TYPES = parameter_types(TOOLS)
TEXT = "def f():\n    return \"</b>\" < 1, 'é\\n'\n"
WHERE = {"a": [1, {"b": None}], "c": 'x "y"'}
ARGUMENTS: dict[str, Any] = {
    "text": TEXT,
    "word": "5",
    "count": -3,
    "ratio": None,
    "sure": True,
    "where": WHERE,
    "days": ["<a>", 2],
}
PLAIN = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ARGUMENTS.items()}
JSON = json.dumps(ARGUMENTS)


def tagged(begin: str, between: str, end: str) -> str:
    return "".join(f"{begin}{key}{between}{value}{end}" for key, value in PLAIN.items())


QWEN = tagged("<parameter=", ">\n", "\n</parameter>\n")
SEED = tagged("<parameter=", ">", "</parameter>\n")
GLM = tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
MINIMAX = tagged('<parameter name="', '">', "</parameter>\n")
CALLED = "<|channel|>commentary to=functions."
ANSWERS = {
    "qwen3_coder": f"<tool_call>\n<function=f>\n{QWEN}</function>\n</tool_call>\n"
    "<tool_call>\n<function=g.h-1>\n</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=f>\n{SEED}</function>\n</seed:tool_call>\n"
    "<seed:tool_call><function=g.h-1></function></seed:tool_call>",
    "glm45": f"<tool_call>f\n{GLM}</tool_call>\n<tool_call>g.h-1\n</tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n{MINIMAX}</invoke>\n'
    '<invoke name="g.h-1">\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_call_begin|>functions.g.h-1:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "f", "arguments": {JSON}}}, {{"name": "g.h-1", "arguments": {{}}}}]',
    "gpt-oss": f"{CALLED}f <|constrain|>json<|message|>{JSON}<|call|>"
    "<|start|>assistant to=functions.g.h-1<|channel|>commentary json<|message|>{}<|call|>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>g.h-1<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama4_json": f'{{"name": "f", "parameters": {JSON}}}; {{"name": "g.h-1", "parameters": {{}}}}',
    "llama4_pythonic": f"<|python_start|>[f({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())}), "
    "g.h-1()]<|python_end|>",
}
"""Each calls f with ARGUMENTS and g.h-1 without any."""

_EACH = "{%- for m in messages if m.tool_calls %}{%- for call in m.tool_calls %}"
_ITEMS = "{%- for key, value in call.function.arguments.items() %}"
_VALUE = "{{ value if value is string else value | tojson }}"
TEMPLATES = {
    "qwen3_coder": f"{_EACH}{{{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}}}{_ITEMS}"
    "{{- '<parameter=' + key + '>\\n' }}{{- (value | tojson if value is mapping or (value is sequence and value is not"
    " string) else value | string) + '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}"
    "{%- endfor %}{%- endfor %}",
    "seed_oss": "{% set tag = '<seed:tool_call>' %}"
    + _EACH
    + "{{ '\\n' + tag + '\\n<function=' + call.function.name }}>\n"
    + _ITEMS
    + "\n<parameter={{ key }}>"
    + _VALUE
    + "</parameter>{% endfor %}\n</function>\n</seed:tool_call>"
    "{%- endfor %}{%- endfor %}",
    "glm45": "{% set think = '<think></think>' %}"
    + _EACH
    + "\n<tool_call>{{ call.function.name }}\n"
    + _ITEMS
    + "\n<arg_key>{{ key }}</arg_key>\n<arg_value>"
    + _VALUE
    + "</arg_value>\n{% endfor %}\n</tool_call>"
    "{%- endfor %}{%- endfor %}",
    "minimax_m2": "{% set think = '<think>' %}{{ '\\n<minimax:tool_call>\\n' }}"
    + _EACH
    + '<invoke name="{{ call.function.name }}">\n'
    + _ITEMS
    + '<parameter name="{{ key }}">'
    + _VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}{%- endfor %}</minimax:tool_call>",
    "kimi_k2": "{% set think = '<think>' %}{{ '<|im_middle|>' }}<|tool_calls_section_begin|>"
    + _EACH
    + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
    "<|tool_call_end|>{%- endfor %}{%- endfor %}<|tool_calls_section_end|>",
    "granite": "{% set hint = 'Here is my thought process:' %}"
    + "<|tool_call|>[{% for m in messages if m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{% endfor %}]",
    "gpt-oss": "{% set channels = '<|channel|>analysis<|message|>' %}"
    + _EACH
    + "{{ '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.function.arguments | tojson }}<|call|>{%- endfor %}{%- endfor %}{% set c = '<|channel|>commentary' %}",
}
"""Templates that write the calls of assistants, as the published ones of a family do."""
REASONING = {
    "glm45": "glm45",
    "minimax_m2": "minimax_m2",
    "kimi_k2": "kimi_k2",
    "granite": "granite",
    "gpt-oss": "gpt-oss",
}
"""Formats of thoughts of these templates."""
