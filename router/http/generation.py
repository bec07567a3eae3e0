"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer.

Every prompt of a call is a request of its own, with its own accounting and place in the queue. When one of them fails,
the call fails at once and the others are cancelled.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from common.errors import InvalidRequest, RequestError
from common.structured import TaskCensus, all_or_first_failure
from router.doors.front_door import Caller, FrontDoor
from router.doors.readers import Reading
from router.http.answers import Answer, MakeAnswer
from router.http.bodies import read_body
from router.http.calls import Call, NameField, body_field, chat_call, completion_call, renamed
from router.http.exchange import Exchange
from router.http.pieces import RequestFacts
from router.http.schema import ChatBody, CompletionBody
from router.http.strict import parse_body
from router.reading.validation import MAX_WHOLE_LOGPROBS
from router.record.budget import Holding
from router.record.outbox import num_entries_in
from router.record.record import Job
from router.tenants import Tenant


def read_completion(raw: bytes) -> Call:
    """Return the call of a `/v1/completions` body. Raises InvalidRequest."""
    return completion_call(parse_body(CompletionBody, raw))


def read_chat(raw: bytes) -> Call:
    """Return the call of a `/v1/chat/completions` body. Raises InvalidRequest."""
    return chat_call(parse_body(ChatBody, raw))


class Deadline:
    """Deadline of a call, known once its body has been read."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def set(self, timeout_s: float | None) -> None:
        """Set it; None leaves the call without one."""
        if timeout_s is not None:
            self._at_s = asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds left; None without a deadline."""
        return None if self._at_s is None else self._at_s - asyncio.get_running_loop().time()


async def serve_all(
    door: FrontDoor,
    census: TaskCensus,
    num_requests: int,
    first: Caller,
    serve: Callable[[int, Caller], Coroutine[Any, Any, None]],
) -> None:
    """Serve the requests of a call side by side, each under an account of its own; `first` has the first one's.

    The others begin in turns of the event loop. Raises the first failure, which cancels the others.
    """

    async def another(position: int) -> None:
        await door.turn(first.tenant)
        caller = replace(first, life=door.new_life())
        with door.account(caller.life, time_left_s=caller.time_left_s):
            await serve(position, caller)

    if num_requests == 1:
        await serve(0, first)
        return
    async with census.owned(serve(0, first), *map(another, range(1, num_requests))) as tasks:
        await all_or_first_failure(tasks)


class GenerationEndpoint:
    """One generating endpoint."""

    def __init__(
        self,
        door: FrontDoor,
        *,
        read: Callable[[bytes], Call],
        answer: MakeAnswer,
        prompt_field: str,
        body_field: NameField = body_field,
    ) -> None:
        """`prompt_field` is the body's name for the prompt; `body_field` returns those of all fields."""
        self._door = door
        self._prompt_field = prompt_field
        self._body_field = body_field
        self._reading = Reading(read, Call)
        self._make_answer = answer
        self._census = TaskCensus()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a call up to the end of the response, which the application sends. Raises KvrelayError."""
        door, deadline = self._door, Deadline()
        life = door.new_life()
        exchange.request_id = life.request_id
        with door.account(life, time_left_s=deadline.left_s):
            tenant, call = await read_body(door, exchange, self._reading)
            deadline.set(call.timeout_s)
            answer = self._make_answer(call, door.reader.codec.decode_pieces, exchange, life.request_id)
            caller = Caller(tenant=tenant, life=life, time_left_s=deadline.left_s, traceparent=exchange.traceparent)
            with door.parts.admission.unsent.holding(tenant) as whole:
                serve = partial(self._serve, call, answer, whole)
                await serve_all(door, self._census, len(call.requests), caller, serve)
                answer.finish()

    async def _serve(self, call: Call, answer: Answer, whole: Holding, position: int, caller: Caller) -> None:
        """Serve one request. Raises KvrelayError that names the body's field."""
        try:
            await self._run(call, position, caller, answer, whole)
        except RequestError as error:
            error.field = renamed(self._body_field(error.field, prompt_field=self._prompt_field), call.names)
            raise

    async def _run(self, call: Call, position: int, caller: Caller, answer: Answer, whole: Holding) -> None:
        """Serve one request; `whole` holds what has come of an answer that is sent whole."""
        request, door = call.requests[position], self._door
        text = request.text if call.wants_echo and not request.HasField("truncate_prompt_tokens") else ""
        async with door.serving(request, caller) as served, self._census.owned(*answer.beside()):
            _check_size(call, served.job)
            facts = answer.facts[position] = RequestFacts(served.job.request_id)
            echo = await self._echo(text, served.job, caller.tenant) if call.wants_echo else None
            answer.open(position, served.job, echo)
            while (message := await served.outbox.get()) is not None:
                if message.HasField("tokens"):
                    if not call.is_streamed and (refused := whole.grow(num_entries_in(message.tokens))) is not None:
                        raise refused.error()
                    await answer.take(position, message.tokens)
                    await door.merging.over()
                elif message.HasField("plan"):
                    facts.plans.append(message.plan)
                elif message.HasField("completed"):
                    facts.completed = message.completed

    async def _echo(self, text: str, job: Job, tenant: Tenant) -> str:
        """Return the prompt as text, which is `text` where the caller sent it as such."""
        return text or await self._door.reader.decode(job.prompt_token_ids, tenant=tenant)


def _check_size(call: Call, job: Job) -> None:
    """Raise InvalidRequest when an answer that is sent whole could have too many log-probabilities."""
    sampling = job.sampling
    if call.is_streamed or sampling.num_logprobs is None:
        return
    num_entries = sampling.n * sampling.max_tokens * (1 + sampling.num_logprobs)
    if num_entries > MAX_WHOLE_LOGPROBS:
        raise InvalidRequest(
            f"{sampling.n} answers of up to {sampling.max_tokens} tokens have up to {num_entries} log-probabilities; an"
            f" answer that is not streamed has at most {MAX_WHOLE_LOGPROBS}: ask for fewer, or for a stream",
            field="sampling.max_tokens",
        )
