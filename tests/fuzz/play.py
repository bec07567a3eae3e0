"""Calls that an input consists of, made side by side, and what may not come of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvrelay.v1 import decode_pb2
from tests.fuzz.world import World

HANG_S = 4000.0
"""Virtual time after which a call that its client does not leave is taken to hang: longer than any limit of one."""
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_UNEXPECTED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
_UNEXPECTED_NUMBERS = tuple(code.value[0] for code in _UNEXPECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call."""

    target: str
    method: str
    """Full name: /kvrelay.v1.Service/Method."""
    messages: tuple[bytes, ...]
    starts_s: float = 0.0
    gap_s: float = 0.0
    """Between two messages of a stream."""
    leaves_s: float | None = None
    """Time at which the client cancels; None: it waits for the end."""
    half_closes: bool = True
    is_stream: bool = False
    ends_with_call: bool = False
    """Whether the client leaves a shared stream when its only call has ended."""
    is_endless: bool = False
    """Whether such a call may last for ever."""
    metadata: tuple[tuple[str, Any], ...] = ()
    is_denied: bool = False
    """Whether its caller may not make it."""
    may_pull: bool = True
    """Whether it has a ticket for what it pulls."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a call."""

    code: grpc.StatusCode | None = None
    """None: the client has left."""
    details: str = ""
    responses: list[Any] = field(default_factory=list)
    hangs: bool = False


async def play(world: World, steps: Sequence[Step]) -> list[str]:
    """Make the calls; return what is wrong with how they ended."""
    outcomes = await asyncio.gather(*(_play(world, step) for step in steps))
    return [wrong for step, outcome in zip(steps, outcomes, strict=True) for wrong in judge(step, outcome)]


async def _play(world: World, step: Step) -> Outcome:
    await asyncio.sleep(step.starts_s)
    outcome = Outcome()
    channel = world.channel()(step.target)
    try:
        async with asyncio.timeout(step.leaves_s if step.leaves_s is not None else HANG_S):
            if step.is_stream:
                call = channel.stream_stream(step.method)(metadata=step.metadata)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_write(call, step))
                    both.create_task(_read(call, outcome, ends_with_call=step.ends_with_call))
            else:
                await _read(channel.unary_stream(step.method)(step.messages[0], metadata=step.metadata), outcome)
    except TimeoutError:
        outcome.hangs = step.leaves_s is None and not step.is_endless
    finally:
        await channel.close()
    return outcome


async def _write(call: Any, step: Step) -> None:
    with suppress(asyncio.InvalidStateError):
        for message in step.messages:
            await call.write(message)
            await asyncio.sleep(step.gap_s)
        if step.half_closes:
            await call.done_writing()


async def _read(call: Any, outcome: Outcome, *, ends_with_call: bool = False) -> None:
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            outcome.responses.append(message)
            if ends_with_call and any(update.HasField("status_code") for update in message.updates):
                return
        outcome.code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        outcome.code, outcome.details = error.code(), error.details() or ""


def judge(step: Step, outcome: Outcome) -> list[str]:
    """Return what may not be about how a call ended."""
    wrong = []
    method = step.method.rpartition("/")[2]
    if outcome.hangs:
        wrong.append(f"hang: {method} has not ended within {HANG_S:g} s of virtual time")
    if outcome.code in _UNEXPECTED:
        wrong.append(f"status: {method} ended with {outcome.code.name}: {outcome.details}")
    if step.is_denied and (outcome.responses or outcome.code not in (*_REFUSALS, None)):
        wrong.append(f"protocol: {method} ended with {outcome.code} for a caller that may not make it")
    if not step.may_pull and outcome.responses:
        wrong.append(f"protocol: {method} has served a pull that its ticket does not allow")
    if method == "Generate":
        wrong += _judge_answer(outcome)
    if method == "DecodeMany":
        wrong += _judge_shared_stream(step, outcome)
    return wrong


def _judge_answer(outcome: Outcome) -> list[str]:
    """An answer ends with one `completed`, or with an error and none."""
    events = [message.WhichOneof("event") for message in outcome.responses]
    num_ends = events.count("completed")
    if outcome.code is grpc.StatusCode.OK and (num_ends != 1 or events[-1] != "completed"):
        return [f"protocol: an answer ended well with {num_ends} terminal messages"]
    if outcome.code is not grpc.StatusCode.OK and num_ends and outcome.code is not None:
        return ["protocol: an error came behind the terminal message"]
    return []


def _judge_shared_stream(step: Step, outcome: Outcome) -> list[str]:
    """No call on a shared stream ends twice, or unexpectedly."""
    wrong: list[str] = []
    num_opened: Counter[int] = Counter()
    for raw in step.messages:
        with suppress(Exception):
            first = decode_pb2.DecodeManyRequest.FromString(raw)
            for message in (first, *first.others):
                num_opened[message.call_id] += message.HasField("open")
    ended: Counter[int] = Counter()
    for update in (update for response in outcome.responses for update in response.updates):
        if not update.HasField("status_code"):
            continue
        ended[update.call_id] += 1
        if update.status_code in _UNEXPECTED_NUMBERS:
            wrong.append(f"status: a call of DecodeMany ended with {update.status_code}: {update.status!r}")
    if any(count > num_opened[call_id] for call_id, count in ended.items()):
        wrong.append("protocol: a call of DecodeMany ended more often than it was opened")
    return wrong
