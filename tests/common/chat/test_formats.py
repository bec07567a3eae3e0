"""The formats of tool calls and reasoning are told from the templates of real models."""

import itertools
import json
import re
from pathlib import Path

import pytest

from common.chat.detection import begun_answer, detect_reasoning_format, detect_tool_format, starts_in_reasoning
from common.chat.formats import MARKERS, REASONING_FORMATS, TOOL_FORMATS
from tests.common.chat.parsed import parse
from tests.common.chat.templates import CALLS, TEMPLATES, answer_by

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", "qwen3"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", None),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", "deepseek_r1"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek_v3", "deepseek_r1"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek_v31", "deepseek_r1"),
    ],
)
def test_template_of_a_model_tells_its_formats(name: str, tools: str | None, reasoning: str | None) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert (detect_tool_format(source), detect_reasoning_format(source)) == (tools, reasoning)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    message = parse([answer_by(source)], tools=detect_tool_format(source))
    assert [(called, json.loads(arguments)) for called, arguments in message.calls] == CALLS


@pytest.mark.parametrize(
    ("source", "tools"),
    [
        ("""{{- '<|python_tag|>' + tool_call.name + ".call(" }}""", "llama3_json"),
        (
            """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name """
            """and its value}.' }}""",
            "llama3_json",
        ),
        ("{{- '<|python_start|>' }}", "pythonic"),
        ("{{- '[func_name1(params_name1=params_value1), func_name2(params)]' }}", "pythonic"),
        (
            r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""",
            "hermes",
        ),
        ("{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}", None),
        ("{{- '<tool_calls><tool_call>' + tool_call.name + '<arg_key>' }}", None),
        ("{{- '<|tool_call|>[' + tools + ']<|/tool_call|>' }}", None),
        ("{{- '<|tool_call|>' + tool_calls }}", "granite"),
        ("""{{- '<tool_call>' }}{{- '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>' }}""", None),
        ("{{- message.role + ': ' + message.content }}", None),
    ],
)
def test_markup_in_a_template_tells_its_format(source: str, tools: str | None) -> None:
    assert (detect_tool_format(source), detect_reasoning_format(source)) == (tools, None)


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n", False),
    ],
)
def test_prompt_that_opens_the_thinking_starts_the_answer_in_it(prompt: str, starts: bool) -> None:
    assert starts_in_reasoning(prompt) == starts


def test_documented_formats_are_those_that_are_read() -> None:
    lines = (DOCS / "openai.md").read_text().split("| `model.tool_parser` |")[1].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[2:])
    assert {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])} == set(TOOL_FORMATS)


def test_formats_are_named_and_their_markers_distinct() -> None:
    for formats in (TOOL_FORMATS, REASONING_FORMATS):
        assert [each.name for each in formats.values()] == list(formats)
    assert len(set(MARKERS)) == len(MARKERS)
    # A reader puts back the beginning of a marker: no other one may begin within it.
    assert all(marker[0] not in marker[1:] for marker in MARKERS)
    assert {name for name, each in TOOL_FORMATS.items() if not each.needs_special_tokens} == {"hermes", "qwen3_coder"}


def test_answer_that_goes_on_from_content_is_past_the_thoughts_of_its_family() -> None:
    begun = {"content": "Yes", "reasoning_content": "Hm"}
    assert begun_answer("<s>A:<seed:think>", begun) == "<s>A:<seed:think>Hm\n</seed:think>\n\nYes"
    assert begun_answer("<|start|>assistant", begun) == "<|start|>assistant<|channel|>final<|message|>Yes"
