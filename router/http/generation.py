"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer.

Every prompt of a call is a request of its own, with its own accounting and place in the queue. When one of them fails,
the call fails at once and the others are cancelled.
"""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from common.errors import InvalidRequest, RequestError
from common.structured import TaskTracker, all_or_first_failure
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


async def serve_all(
    door: FrontDoor,
    tracker: TaskTracker,
    num_requests: int,
    first: Caller,
    serve: Callable[[int, Caller], Coroutine[Any, Any, None]],
) -> None:
    """Serve the requests of a call side by side, each under an account of its own; `first` has the first one's.

    The others begin in turns of the event loop. Raises the first failure, which cancels the others.
    """
    deadline_s = first.life.deadline_s

    async def another(position: int) -> None:
        await door.turn(first.tenant)
        caller = replace(first, life=door.new_life(deadline_s=deadline_s))
        with door.account(caller.life):
            await serve(position, caller)

    if num_requests == 1:
        await serve(0, first)
        return
    async with tracker.owned(serve(0, first), *map(another, range(1, num_requests))) as tasks:
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
        self._tracker = TaskTracker()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a call up to the end of the response, which the application sends. Raises KvrelayError."""
        door, life = self._door, self._door.new_life()
        exchange.request_id = life.request_id
        with door.account(life):
            tenant, call = await read_body(door, exchange, self._reading)
            life.end_within(call.timeout_s)
            answer = self._make_answer(call, door.reader.codec.decode_pieces, exchange, life.request_id)
            caller = Caller(tenant=tenant, life=life, traceparent=exchange.traceparent)
            if name := exchange.session_name:
                for request in call.requests:
                    request.session_id = name
            with door.parts.admission.unsent.holding(tenant) as whole:
                serve = partial(self._serve, call, answer, whole)
                await serve_all(door, self._tracker, len(call.requests), caller, serve)
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
        async with door.serving(request, caller) as served, self._tracker.owned(*answer.beside()):
            _check_size(call, served.job)
            facts = answer.facts[position] = RequestFacts(served.job.request_id)
            echo = await self._echo(text, served.job, caller.tenant) if call.wants_echo else None
            answer.open(position, served.job, echo)
            while (message := await served.outbox.get()) is not None:
                if message.HasField("tokens"):
                    facts.begun = facts.begun or served.usage
                    if not call.is_streamed and (refused := whole.grow(num_entries_in(message.tokens))) is not None:
                        raise refused.error()
                    await answer.take(position, message.tokens)
                    await door.merging.over()
                elif message.HasField("plan"):
                    facts.plans.append(message.plan)
                elif message.HasField("completed"):
                    facts.completed = message.completed
            served.ends_in_calls = answer.ends_in_calls

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
