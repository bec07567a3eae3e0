"""Puts workers on trial: each computes the same fixed prompts, whose answers must be the same on all of a model.

A trial is inconclusive when the worker has no room for it now, cannot be reached (its supervisor notices a loss by
itself) or does not know trials yet.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import grpc

from common.errors import EngineFault, from_rpc_error
from common.rpc import Connect
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

NUM_TOKENS = 16
"""Tokens of each answer: as many decode steps, which the worker's timing model learns from."""
TIMEOUT_S = 20.0

Answers = tuple[tuple[int, ...], ...]
"""Tokens of the answer to each prompt."""


class TrialFailed(Exception):
    """A worker did not answer, or not as its peers did; the message says which."""


Try = Callable[[str], Awaitable[Answers | None]]
"""Has the worker at host:port compute; returns None for an inconclusive trial, raises TrialFailed."""


async def try_worker(address: str, connect: Connect, *, timeout_s: float = TIMEOUT_S) -> Answers | None:
    """See Try."""
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            response = await stub.RunTrial(worker_pb2.RunTrialRequest(num_tokens=NUM_TOKENS), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TrialFailed(f"it has not answered within {timeout_s:g} s") from None
            if isinstance(failure := from_rpc_error(error), EngineFault):
                raise TrialFailed(f"it cannot compute: {failure.message}") from None
            return None
    return tuple(tuple(answer.token_ids) for answer in response.answers)


def compare(answers: Answers, peers: Collection[Answers]) -> None:
    """Raise TrialFailed if the answers differ from those that most peers gave. Without peers, any answers pass."""
    if not peers:
        return
    usual, num_usual = Counter(peers).most_common(1)[0]
    wrong = [str(number) for number, (own, other) in enumerate(zip(answers, usual, strict=False)) if own != other]
    if wrong or len(answers) != len(usual):
        raise TrialFailed(f"its answers to prompts {', '.join(wrong)} differ from those of {num_usual} of its peers")
