"""Writes responses: event by event, or as one document."""

import time
from collections.abc import Iterable
from typing import Any

from common.errors import KvrelayError
from common.ids import RequestId
from kvrelay.v1 import inference_pb2
from kvrelay.v1 import inference_pb2 as pb
from router.http.answers import Answer
from router.http.calls import Call
from router.http.errors import error_of, kind_of
from router.http.exchange import Exchange
from router.http.pieces import usage_of
from router.http.responses.output import ResponseOutput
from router.http.responses.parts import Events
from router.http.styles import TokenTexts
from router.record.record import Job

Document = dict[str, Any]
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of a failed response by status; all others are `server_error`."""


def response_answer(call: Call, texts: TokenTexts, exchange: Exchange, answer_id: RequestId) -> Answer:
    """Return the answer to a call of `/v1/responses`, under the id of its request."""
    return ResponseAnswer(call, texts, exchange, answer_id=answer_id)


class ResponseAnswer(Answer):
    """The answer to one request."""

    def __init__(self, call: Call, texts: TokenTexts, exchange: Exchange, *, answer_id: RequestId) -> None:
        super().__init__(call, exchange)
        self._events = Events(is_streamed=call.is_streamed)
        self._texts = texts if call.wants_logprobs else None
        self._id = answer_id
        self._created = int(time.time())
        self._settings: Document = {}
        self._model = ""
        self._output = self._output_in(pb.AnswerFormat())
        self._has_begun = False
        exchange.failure_events = self._fail

    def open(self, position: int, job: Job, echo: str | None) -> None:
        """Begin the request."""
        self._model = job.model.name
        if job.answer_format is not None:
            self._output = self._output_in(job.answer_format)
        self._settings = dict(self._call.settings)
        for name in ("temperature", "top_p"):
            if self._settings[name] is None:
                self._settings[name] = getattr(job.sampling, name)

    @property
    def ends_in_calls(self) -> bool:
        """See `Answer`."""
        return self._output.ends_in_calls

    async def take(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Add the tokens; events about them go out in one write."""
        if not delta.tokens:
            return
        self._begin()
        self._output.take(delta.tokens)
        await self._exchange.write_parts(self._events.take())

    def finish(self) -> None:
        """Write the end, or the document."""
        self._begin()
        self._output.close()
        status: str = "completed"
        how: Document = {"completed_at": int(time.time())}
        if self._output.is_cut:
            status, how = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        rest = {"usage": self._usage(), **how, **self._report()}
        response = self._response(status, output=self._output.documents, **rest)
        if not self._call.is_streamed:
            self._exchange.finish_json(response)
            return
        self._events.emit(f"response.{status}", response=response)
        self._exchange.finish(self._events.take())

    def _output_in(self, answer: pb.AnswerFormat) -> ResponseOutput:
        return ResponseOutput(self._events, request_id=self._id, answer=answer, texts=self._texts)

    def _begin(self) -> None:
        """Add the events of the beginning, once."""
        if not self._has_begun:
            self._has_begun = True
            for kind in ("response.created", "response.in_progress"):
                self._events.emit(kind, response=self._response("in_progress"))

    def _fail(self, error: KvrelayError) -> Iterable[str]:
        """Return the last events of a stream that fails; OpenAI's client raises on the second one."""
        self._begin()
        code = _ERROR_CODES.get(kind_of(error).status, "server_error")
        failed = self._response("failed", output=self._output.partial(), error={"code": code, "message": error.message})
        self._events.emit("response.failed", response=failed)
        body = error_of(error)
        self._events.emit(
            "error", code=body["code"] or body["type"], message=body["message"], param=body["param"], error=body
        )
        return self._events.take()

    def _response(self, status: str, **members: Any) -> Document:
        """Return the response as it stands."""
        document: Document = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **self._settings,
        }
        return document | members

    def _usage(self) -> Document:
        """Return the token counts."""
        usage = usage_of(self.facts.values())
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._output.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
