"""Loads a model folder's tokenizer, chat templates and recommended sampling. Raises ModelNotFound.

Needs neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from common.chat_template import ChatTemplate
from common.errors import InvalidRequest
from common.model_files import ModelNotFound
from common.process import CannotStart
from common.sampling import PARAMETERS

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TEMPLATE_KEY = "model.chat_template"
_LARGEST_VOCABULARY = 1 << 24
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a Hugging Face folder; blocks for more than 100 ms."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{model_dir} holds no tokenizer.json: only fast tokenizers can be served")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelNotFound(f"cannot read {path}: {error}; fetch or copy the model again") from error


def load_chat_template(model_dir: Path, *, own: Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face folder, or None without one; the file `own` takes its place.

    Raises CannotStart for one that cannot be used.
    """
    config = _read_json(model_dir / "tokenizer_config.json")
    named = _special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config})
    sources = _template_sources(model_dir, config) if own is None else {"default": _read_template(own)}
    if not sources:
        return None
    if "default" not in sources:
        raise ModelNotFound(f"{model_dir}: of the chat templates {', '.join(sources)} none is named default")
    try:
        return ChatTemplate(sources["default"], special_tokens=named, tool_source=sources.get("tool_use"))
    except jinja2.TemplateSyntaxError as error:
        where, key = (f"in {model_dir}", None) if own is None else (str(own), _TEMPLATE_KEY)
        raise ModelNotFound(f"the chat template {where} does not compile: {error}", key=key) from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"cannot read {path}: {error}", key=_TEMPLATE_KEY) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedSampling:
    """The sampling in a generation_config.json."""

    values: Mapping[str, float]
    """Usable values, by option."""
    faults: tuple[str, ...]
    """Values that are left out, each with the reason."""


def read_recommended_sampling(model_dir: Path) -> RecommendedSampling:
    """Return the sampling that the model's makers recommend, read as the same values of a request are.

    Makers who switch sampling off recommend the most probable tokens.
    """
    given = _read_json(model_dir / "generation_config.json")
    if given.get("do_sample") is False:
        given = {"repetition_penalty": given.get("repetition_penalty"), "temperature": 0.0}
    values, faults = dict[str, float](), list[str]()
    for parameter in PARAMETERS:
        value = given.get(parameter.name)
        if parameter.name not in _RECOMMENDED or value is None:
            continue
        if parameter.name == "top_k" and value == -1:  # all, like 0
            value = 0
        if parameter.type is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int if parameter.type is int else int | float):
            faults.append(f"{parameter.name} is {value!r}, not a {'whole ' if parameter.type is int else ''}number")
            continue
        try:
            parameter.check(value, vocab_size=_LARGEST_VOCABULARY)
        except InvalidRequest as error:
            faults.append(error.message)
        else:
            values[parameter.name] = value
    return RecommendedSampling(values=values, faults=tuple(faults))


def load_sampling_defaults(model_dir: Path) -> Mapping[str, float]:
    """Return the usable part of the recommended sampling, by option."""
    return read_recommended_sampling(model_dir).values


def load_eos_token_id(model_dir: Path) -> int | None:
    """Return the token that ends a text in the tokenizer's configuration; None if it names none."""
    config = _read_json(model_dir / "tokenizer_config.json")
    eos = _special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config}).get("eos_token")
    if eos is None:
        return None
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        if token["content"] == eos:
            return int(token_id)
    is_there = (model_dir / "tokenizer.json").is_file()
    return load_tokenizer(model_dir).token_to_id(eos) if is_there else None


def _template_sources(model_dir: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the templates' sources by name: those in files of their own, else those in a configuration."""
    files = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (model_dir / "chat_template.jinja").is_file():
        files["default"] = model_dir / "chat_template.jinja"
    own = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if "default" in own:
        return own
    configured = config.get("chat_template") or _read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(configured, list):
        configured = {each["name"]: each["template"] for each in configured}
    named = {"default": configured} if isinstance(configured, str) else configured or {}
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        raise ModelNotFound(f"{model_dir}: chat_template in tokenizer_config.json is neither a string nor a list")
    return {**named, **own}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; each is given as a string, or as an object with `content`."""
    found = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    return {name: token if isinstance(token, str) else str(token["content"]) for name, token in found.items()}


def _read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty without the file. Raises ModelNotFound for any other content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} holds no JSON object")
    return content
