"""Checkpoint folders as their makers write them: templates in several files, recommended sampling that means "off"."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.chat_template import Conversation
from common.model_files import ModelNotFound
from common.process import CannotStart
from common.text_files import load_chat_template, read_recommended_sampling

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LISTED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "listed {{ tools | length }}"}]


def render(folder: Path, *, tools: bool, own: Path | None = None) -> str:
    template = load_chat_template(folder, own=own)
    assert template is not None
    chat = Conversation(messages=[{"role": "user", "content": "x"}], tools=[TOOL] if tools else ())
    return template.render(chat, rendered_unix_s=0)


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": json.dumps({"chat_template": LISTED})}, "plain", "listed 1"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "one"})}, "one", "one"),
        ({"chat_template.json": json.dumps({"chat_template": "processor"})}, "processor", "processor"),
        (
            {"tokenizer_config.json": json.dumps({"chat_template": LISTED}), "chat_template.jinja": "file"},
            "file",
            "file",
        ),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "beside"}, "file", "beside"),
        (
            {
                "tokenizer_config.json": json.dumps({"chat_template": "one"}),
                "additional_chat_templates/tool_use.jinja": "beside",
            },
            "one",
            "beside",
        ),
    ],
)
def test_tools_take_the_template_that_is_made_for_them(
    tmp_path: Path, files: dict[str, str], plain: str, with_tools: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (render(tmp_path, tools=False), render(tmp_path, tools=True)) == (plain, with_tools)


def test_own_template_takes_the_place_of_the_checkpoints_also_where_tools_are_given(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LISTED}))
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    assert render(tmp_path, tools=True, own=own) == "mine"


@pytest.mark.parametrize("text", [None, "{% if"])
def test_own_template_that_cannot_be_used_names_its_key(tmp_path: Path, text: str | None) -> None:
    own = tmp_path / "own.jinja"
    if text is not None:
        own.write_text(text)
    with pytest.raises(CannotStart, match=r"own\.jinja") as refused:
        load_chat_template(tmp_path, own=own)
    assert refused.value.key == "model.chat_template"


@pytest.mark.parametrize("configured", [{"tool_use": "x"}, 5, [{"name": "default", "template": None}]])
def test_templates_without_a_usable_default_are_refused(tmp_path: Path, configured: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": configured}))
    with pytest.raises(ModelNotFound, match=r"chat.template"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("given", "values", "faults"),
    [
        ({"top_k": -1, "top_p": 0.9}, {"top_k": 0, "top_p": 0.9}, []),
        ({"top_k": 50.0, "temperature": 1}, {"top_k": 50, "temperature": 1}, []),
        ({"top_k": 50.5}, {}, ["top_k is 50.5, not a whole number"]),
        ({"top_p": 0.0, "min_p": 0.1}, {"min_p": 0.1}, ["top_p is 0.0"]),
        ({"temperature": 20, "repetition_penalty": 0}, {}, ["temperature is 20", "repetition_penalty is 0"]),
        ({"temperature": "0.7", "top_k": True, "top_p": None}, {}, ["temperature is '0.7'", "top_k is True"]),
        ({"temperature": float("nan")}, {}, ["temperature is nan"]),
        ({"do_sample": False, "temperature": 0.6, "top_p": 7}, {"temperature": 0.0}, []),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}, []),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}, []),
    ],
)
def test_recommended_values_are_read_like_those_of_a_request(
    tmp_path: Path, given: dict[str, Any], values: dict[str, float], faults: list[str]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    found = read_recommended_sampling(tmp_path)
    assert json.dumps(dict(found.values), sort_keys=True) == json.dumps(values, sort_keys=True)  # 50, not 50.0
    assert len(found.faults) == len(faults)
    assert all(text.startswith(fault) for text, fault in zip(found.faults, faults, strict=True))
