"""Checks the model's files on this host: weights, tokenizer and chat template."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from common.chat_template import Conversation
from common.config import ServingConfig
from common.errors import InvalidRequest
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from common.process import CannotStart
from common.random_models import SEED_FILE
from router.tokenizer import TextCodec


def check_model(config: ServingConfig) -> Iterator[DoctorFinding]:
    """Yield whether this host has the model's files, and whether a conversation becomes a prompt."""
    model, own = config.model, config.model.chat_template
    if model.engine == "fake":
        yield ok("model files", "the fake engine needs none")
        return
    folder = None
    try:
        folder = resolve_model(model.id, local_files_only=True)
    except ModelNotFound as error:
        if model.id == DEFAULT_MODEL_ID:
            yield warning("model files", str(error), "nothing: `kvrelay up` fetches it, in about 20 s")
        else:
            advice = "correct model.id, or put the files there; every host of the cluster needs them"
            yield failure("model files", str(error), advice)
    else:
        yield _files(folder)
    if own is not None and not own.expanduser().is_file():
        yield failure("chat template", f"there is no file {own}", "correct model.chat_template")
    elif folder is not None:
        yield _chat_template(folder, own)


def _files(folder: Path) -> DoctorFinding:
    missing = [name for name in _weight_files(folder) if not (folder / name).is_file()]
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        missing.append("tokenizer.json")
    if missing:
        shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        return failure(
            "model files", f"{shown} missing in {folder}", "fetch the model again: the download is incomplete"
        )
    return ok("model files", str(folder))


def _weight_files(folder: Path) -> list[str]:
    """Return the weight files that the model must have."""
    if (folder / SEED_FILE).is_file():
        return []
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        has_weights = any(file.suffix in (".safetensors", ".gguf") for file in folder.iterdir())
        return [] if has_weights else ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _chat_template(folder: Path, own: Path | None) -> DoctorFinding:
    """Return whether the tokenizer and the template, the checkpoint's or a file of one's own, read a conversation."""
    try:
        codec = TextCodec.load(folder, chat_template=own and own.expanduser())
        if codec.template_source is None:
            advice = "set model.chat_template to a file, or ask for completions of plain text"
            return warning("chat template", f"{folder} has none: chats are refused", advice)
        conversation = Conversation.plain([("user", "Hello")])
        encoded = codec.encode_chat_now(conversation, rendered_unix_s=int(time.time()))
    except (CannotStart, InvalidRequest) as error:
        source = "the file of model.chat_template" if own is not None else f"the files in {folder}"
        return failure("chat template", str(error), f"correct {source}")
    return ok("chat template", f"{own or folder.name}: a greeting has {len(encoded.token_ids)} tokens")
