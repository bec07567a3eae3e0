"""Loads a model folder's tokenizer, chat template and recommended sampling. Raises ModelNotFound.

Needs neither torch nor transformers.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from common.chat_template import ChatTemplate
from common.model_files import ModelNotFound

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
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


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face folder, or None without one."""
    config = _read_json(model_dir / "tokenizer_config.json")
    named = _special_tokens({**_read_json(model_dir / "special_tokens_map.json"), **config})
    source = _template_source(model_dir, config)
    try:
        return ChatTemplate(source, special_tokens=named) if source is not None else None
    except jinja2.TemplateSyntaxError as error:
        raise ModelNotFound(f"the chat template in {model_dir} does not compile: {error}") from error


def load_sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Return the sampling that the model's makers recommend in generation_config.json, by option."""
    given = _read_json(model_dir / "generation_config.json")
    return {name: given[name] for name in _RECOMMENDED if isinstance(given.get(name), int | float)}


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the template's source: its own file, else the entry in the tokenizer's configuration."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    configured = config.get("chat_template")
    if isinstance(configured, list):
        named = {each["name"]: each["template"] for each in configured}
        if "default" not in named:
            raise ModelNotFound(f"{model_dir}: of the chat templates {', '.join(named)} none is named default")
        configured = named["default"]
    if configured is not None and not isinstance(configured, str):
        raise ModelNotFound(f"{model_dir}: chat_template in tokenizer_config.json is neither a string nor a list")
    return configured


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
