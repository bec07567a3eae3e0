"""`/v1/embeddings`: from a body to an answer.

Every input of a call is a request of its own, with its own accounting and place in the line. When one of them fails,
the call fails at once and the others are cancelled. Each vector becomes text as it comes, so that no turn of the event
loop renders a long answer.
"""

import base64
import json
from dataclasses import dataclass
from functools import partial

from common.errors import InvalidRequest, RequestError
from common.pooling import Pooling, pooling_to_proto
from common.structured import TaskTracker
from common.wire import unpack_floats
from kvrelay.v1 import inference_pb2 as pb
from router.doors.front_door import Caller, FrontDoor
from router.doors.readers import Reading
from router.http.bodies import read_body
from router.http.calls import body_field, read_prompts, read_timeout, set_terms
from router.http.exchange import Exchange
from router.http.generation import serve_all
from router.http.pieces import RequestFacts, report_of, usage_of
from router.http.schema import EmbeddingBody
from router.http.strict import parse_body

_LARGEST = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """One HTTP call: requests, and the form of their answer."""

    requests: tuple[pb.EmbedRequest, ...]
    is_base64: bool
    wants_report: bool
    timeout_s: float | None
    left_out: tuple[str, ...]
    """Parts of the body without an effect, which the client is told."""


def read_embeddings(raw: bytes) -> EmbeddingCall:
    """Return the call of a `/v1/embeddings` body. Raises InvalidRequest that names the field."""
    body = parse_body(EmbeddingBody, raw)
    if body.dimensions is not None and not 1 <= body.dimensions <= _LARGEST:
        raise InvalidRequest(f"dimensions is {body.dimensions}; it must be at least 1", field="dimensions")
    shared = pb.EmbedRequest(
        model=body.model or "",
        pooling=pooling_to_proto(Pooling(body.pooling or "last")),
        normalize=body.normalize,
        dimensions=body.dimensions,
    )
    set_terms(shared, body)
    requests = []
    for prompt in read_prompts(body.input, "input"):
        request = pb.EmbedRequest(**prompt)
        request.MergeFrom(shared)
        requests.append(request)
    return EmbeddingCall(
        requests=tuple(requests),
        is_base64=body.encoding_format == "base64",
        wants_report=body.kvrelay is not None and bool(body.kvrelay.report),
        timeout_s=read_timeout(body.kvrelay),
        left_out=body.left_out,
    )


_READING = Reading(read_embeddings, EmbeddingCall)


class Embeddings:
    """The endpoint."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._tracker = TaskTracker()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a call up to the end of the response, which the application sends. Raises KvrelayError."""
        door, life = self._door, self._door.new_life()
        exchange.request_id = life.request_id
        with door.account(life):
            tenant, call = await read_body(door, exchange, _READING)
            life.end_within(call.timeout_s)
            caller = Caller(tenant=tenant, life=life, traceparent=exchange.traceparent)
            answer = _Answer(call)
            serve = partial(self._serve, call, answer)
            await serve_all(door, self._tracker, len(call.requests), caller, serve)
            exchange.finish_body(answer.render(), "application/json")

    async def _serve(self, call: EmbeddingCall, answer: "_Answer", position: int, caller: Caller) -> None:
        """Serve one request. Raises KvrelayError that names the body's field."""
        try:
            answer.take(position, await self._door.embed(call.requests[position], caller))
        except RequestError as error:
            error.field = body_field(error.field, prompt_field="input")
            if error.field == "input" and len(call.requests) > 1:
                error.field = f"input[{position}]"
            raise


class _Answer:
    """The answers of a call's requests, in the order of its inputs."""

    def __init__(self, call: EmbeddingCall) -> None:
        self._call = call
        self._items: dict[int, str] = {}
        self._facts: dict[int, RequestFacts] = {}
        self._model = ""

    def take(self, position: int, response: pb.EmbedResponse) -> None:
        """Take the answer of one request, as text."""
        if self._call.is_base64:
            vector = f'"{base64.b64encode(response.embedding).decode()}"'
        else:
            vector = json.dumps(unpack_floats(response.embedding).tolist())
        self._items[position] = f'{{"object":"embedding","index":{position},"embedding":{vector}}}'
        self._model = response.model
        facts = RequestFacts(response.request_id, plans=list(response.plans), completed=response.completed)
        self._facts[position] = facts

    def render(self) -> bytes:
        """Return the document."""
        facts = [self._facts[position] for position in sorted(self._facts)]
        usage = usage_of(facts)
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
        rest = {"model": self._model, "usage": counts} | (
            {"kvrelay": report_of(facts)} if self._call.wants_report else {}
        )
        items = ",".join(self._items[position] for position in sorted(self._items))
        return f'{{"object":"list","data":[{items}],{json.dumps(rest)[1:]}'.encode()
