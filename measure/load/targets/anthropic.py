"""Load target for servers with Anthropic's Messages API."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import EngineFault, InvalidRequest, UnknownModel
from kvrelay.client.chat import ChatMessage
from measure.load.records import ServerReport
from measure.load.targets.completion import error_in_stream
from measure.load.targets.interface import Feature, TargetAnswer, TargetInfo, TargetRequest, TargetSpec
from measure.load.targets.openai import OpenAiTarget

SCHEME = "anthropic+"
"""What stands before http or https in the address of such a server."""
_VERSION = "2023-06-01"
_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_NO_EXACT_LENGTH = "Anthropic's API has no exact lengths: answers may be shorter than asked for"


class AnthropicTarget(OpenAiTarget):
    """A `Target` for `/v1/messages`. Streams; greedy; takes chats alone."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(replace(spec, url=spec.url.removeprefix(SCHEME)))
        self.spec = spec
        self._headers = {"anthropic-version": _VERSION} | ({"x-api-key": spec.api_key} if spec.api_key else {})

    @property
    def name(self) -> str:
        """Kind and address."""
        return f"Anthropic's API at {self._base}"

    async def describe(self) -> TargetInfo:
        """Ask for the models. Raises KvrelayError."""
        models = [each["id"] for each in (await self._get_json(f"{self._base}/models")).get("data", ()) if "id" in each]
        if not models:
            raise UnknownModel(f"{self.name} serves no model")
        self._model = self._model or str(models[0])
        self.spec = replace(self.spec, model=self._model, features=())
        return TargetInfo(
            system="Messages API",
            model=self._model,
            max_model_len=None,
            vocab_size=None,
            num_workers={},
            notes=(_NO_EXACT_LENGTH,),
        )

    def _reader(self) -> "MessageReader":
        return MessageReader()

    def _body(self, request: TargetRequest, features: Sequence[Feature]) -> tuple[str, dict[str, Any]]:
        messages = [turn for turn in request.prompt if isinstance(turn, ChatMessage)]
        if not messages:
            raise InvalidRequest("Anthropic's API takes chats: give --content chat", field="content")
        return "/messages", {
            "model": self._model,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "messages": [{"role": turn.role, "content": turn.content} for turn in messages],
        }


class MessageReader:
    """Collects one streamed message."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._usage: dict[str, int] = {}
        self._id: str | None = None
        self._is_over = False

    def take(self, data: bytes) -> int | None:
        """Take the data of an event; return 1 for a piece of the answer, None for any other. Raises KvrelayError."""
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EngineFault(f"an event is not a JSON object: {data[:80]!r}")
        match event.get("type"):
            case "error":
                raise error_in_stream(event.get("error"))
            case "message_start":
                message = event.get("message") or {}
                self._id = message.get("id")
                self._count(message)
            case "message_delta":
                self._count(event)
            case "message_stop":
                self._is_over = True
            case "content_block_delta":
                delta = event.get("delta") or {}
                self._texts.append(delta.get("text") or "")
                return 1
        return None

    def build(self) -> TargetAnswer:
        """Return the answer. Raises EngineFault when its end is missing."""
        if not self._is_over:
            raise EngineFault("the server ended the stream before the answer was complete")
        usage = self._usage
        cached = usage.get("cache_read_input_tokens")
        return TargetAnswer(
            text="".join(self._texts),
            token_ids=None,
            num_prompt_tokens=sum(usage.get(name, 0) for name in _INPUT) if "input_tokens" in usage else None,
            num_output_tokens=usage.get("output_tokens"),
            report=ServerReport(request_id=self._id, num_cached_tokens=cached),
        )

    def _count(self, part: Mapping[str, Any]) -> None:
        counts = part.get("usage") or {}
        self._usage |= {name: value for name, value in counts.items() if isinstance(value, int)}
