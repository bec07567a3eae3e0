"""Chat templates of real models, and the tool calls that they write."""

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
CALLS: list[tuple[str, Any]] = [("get_weather", {"city": 'Zürich <"8001">', "days": [1, {"a": None}]}), ("now", {})]


def as_the_template_wants(message: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a message, whose calls have arguments as objects, in the form that DeepSeek-R1's first template needs."""
    if "tool_calls" not in message or "== 'assistant' and message['content'] is none" not in source:
        return message
    calls = [
        call | {"function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"content": message["content"] or None, "tool_calls": calls}


def as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def answer_by(source: str) -> str:
    """Return an answer that consists of CALLS, as a template writes it into a later prompt."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
    calls = [{"type": "function", "id": "abcdefghi", "function": each} for each in functions]
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        as_the_template_wants({"role": "assistant", "content": "", "tool_calls": calls}, source),
    ]
    prompts: Any = render_jinja_template([conversation], chat_template=source, bos_token="<s>", eos_token="</s>")
    return str(prompts[0][0].rpartition("Weather?")[2])
