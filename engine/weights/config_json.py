"""Reads config.json, and refuses one that cannot be read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.process import CannotStart

# A damaged or hostile file could otherwise claim billions, and take all memory.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 24  # of a vocabulary or a layer


class UnsupportedModel(CannotStart):
    """The checkpoint is incomplete or needs something that is not implemented; the message names it."""

    key = "model.id"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises UnsupportedModel when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return content


def positive(raw: Mapping[str, Any], key: str, *, default: int | None = None, at_most: int | None = None) -> int:
    """Return a number of config.json. Raises UnsupportedModel unless it is positive, and not larger than supported."""
    value = raw.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}, not a positive number")
    if at_most is not None and value > at_most:
        raise UnsupportedModel(f"{key}: {value} is not supported, only up to {at_most}")
    return value


def count(raw: Mapping[str, Any], key: str) -> int:
    """Return a number of config.json, 0 where it has none. Raises UnsupportedModel for anything else."""
    return positive(raw, key) if raw.get(key) else 0
