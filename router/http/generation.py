"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer.

Every prompt of a call is a request of its own, with its own accounting and place in the queue. When one of them fails,
the call fails at once and the others are cancelled.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from common.errors import RequestError
from common.structured import TaskCensus, all_or_first_failure
from kvrelay.v1 import inference_pb2 as pb
from router.front_door import Caller, FrontDoor
from router.http.answers import Answer, GatheredAnswer, StreamedAnswer
from router.http.calls import Call, body_field, chat_call, completion_call
from router.http.exchange import Exchange
from router.http.pieces import RequestFacts
from router.http.schema import ChatBody, CompletionBody, parse_body
from router.http.styles import Style, TokenTexts
from router.record import Job
from router.tenants import Tenant

BODY_TIMEOUT_S = 60.0
"""Longest wait for a body."""


def read_completion(raw: bytes) -> Call:
    """Return the call of a `/v1/completions` body. Raises InvalidRequest."""
    return completion_call(parse_body(CompletionBody, raw))


def read_chat(raw: bytes) -> Call:
    """Return the call of a `/v1/chat/completions` body. Raises InvalidRequest."""
    return chat_call(parse_body(ChatBody, raw))


class _Deadline:
    """Deadline of a call, known once its body has been read."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def set(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._at_s = asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        return None if self._at_s is None else self._at_s - asyncio.get_running_loop().time()


class Generation:
    """One generating endpoint."""

    def __init__(
        self,
        door: FrontDoor,
        *,
        read: Callable[[bytes], Call],
        style: Callable[[TokenTexts], Style],
        prompt_field: str,
    ) -> None:
        """`prompt_field` is the body's name for the prompt."""
        self._door = door
        self._prompt_field = prompt_field
        self._read = read
        self._style = style
        self._census = TaskCensus()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a call up to the end of the response, which the application sends. Raises KvrelayError."""
        door, deadline = self._door, _Deadline()
        life = door.new_life()
        exchange.request_id = life.request_id
        with door.account(life, time_left_s=deadline.left_s):
            tenant = door.identify(exchange.metadata)
            call = self._read(await exchange.body(timeout_s=BODY_TIMEOUT_S))
            deadline.set(call.timeout_s)
            style = self._style(door.reader.codec.decode_pieces)
            kind = StreamedAnswer if call.is_streamed else GatheredAnswer
            answer: Answer = kind(call, style, exchange, answer_id=life.request_id)
            caller = Caller(tenant=tenant, life=life, time_left_s=deadline.left_s)
            if len(call.requests) == 1:
                await self._serve(call, 0, caller, answer)
            else:
                rest = range(1, len(call.requests))
                works = [self._serve_another(call, position, caller, answer) for position in rest]
                async with self._census.owned(self._serve(call, 0, caller, answer), *works) as tasks:
                    await all_or_first_failure(tasks)
            answer.finish()

    async def _serve_another(self, call: Call, position: int, first: Caller, answer: Answer) -> None:
        """Serve a further request of a call under its own account."""
        caller = replace(first, life=self._door.new_life())
        with self._door.account(caller.life, time_left_s=caller.time_left_s):
            await self._serve(call, position, caller, answer)

    async def _serve(self, call: Call, position: int, caller: Caller, answer: Answer) -> None:
        """Serve one request. Raises KvrelayError that names the body's field."""
        try:
            await self._run(call, position, caller, answer)
        except RequestError as error:
            error.field = body_field(error.field, prompt_field=self._prompt_field)
            raise

    async def _run(self, call: Call, position: int, caller: Caller, answer: Answer) -> None:
        request, merging = call.requests[position], self._door.merging
        async with self._door.serving(request, caller) as served:
            facts = answer.facts[position] = RequestFacts(served.job.request_id)
            echo = await self._echo(request, served.job, caller.tenant) if call.wants_echo else None
            answer.open(position, served.job, echo)
            while (message := await served.outbox.get()) is not None:
                if message.HasField("tokens"):
                    await answer.take(position, message.tokens)
                    await merging.over()
                elif message.HasField("plan"):
                    facts.plans.append(message.plan)
                elif message.HasField("completed"):
                    facts.completed = message.completed

    async def _echo(self, request: pb.GenerateRequest, job: Job, tenant: Tenant) -> str:
        """Return the prompt as text."""
        if request.HasField("text"):
            return request.text
        return await self._door.reader.codec.decode(job.prompt_token_ids, tenant=tenant)
