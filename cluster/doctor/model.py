"""Checks the model on this host: its folder, tokenizer and chat template. Workers check the weights as they load."""

import time
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from cluster.doctor.ranks import check_ranks
from common.chat_template import Conversation
from common.config import ServingConfig
from common.errors import InvalidRequest
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from common.process import CannotStart
from router.reading.tokenizer import TextCodec


def check_model(config: ServingConfig) -> Iterator[DoctorFinding]:
    """Yield whether this host has the model, and whether a conversation becomes a prompt."""
    if config.model.engine == "fake":
        yield ok("model files", "the fake engine needs none")
        return
    try:
        folder = resolve_model(config.model.id, local_files_only=True)
    except ModelNotFound as error:
        if config.model.id == DEFAULT_MODEL_ID:
            yield warning("model files", str(error), "nothing: `kvrelay up` fetches it, in about 20 s")
        else:
            advice = "correct model.id, or put the files there; every host of the cluster needs them"
            yield failure("model files", str(error), advice)
        return
    yield ok("model files", str(folder))
    yield from check_ranks(config, folder)
    yield _chat_template(folder, config.model.chat_template)


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
