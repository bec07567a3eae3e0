"""Answers as a client sees them: the time of every token, and the whole answer at the end."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.client import AsyncClient, AsyncGenerationStream, Generation, KvrelayError, Token

_T = TypeVar("_T")
_STORY = "Tell me a long story about lighthouse keeper number {0} and the ships that pass. "


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request's answer; a request that failed has the tokens until then."""

    sent_s: float
    stamps_s: list[float] = field(default_factory=list)
    """Time of each token, on the clock of `sent_s`."""
    error: KvrelayError | None = None
    _generation: Generation | None = None

    @property
    def ttft_s(self) -> float:
        """Time from sending to the first token."""
        return self.stamps_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between two tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.stamps_s)]

    @property
    def largest_gap_s(self) -> float:
        """Largest gap between two tokens; 0 with a single token."""
        return max(self.gaps_s, default=0.0)

    @property
    def generation(self) -> Generation:
        """The whole answer. Raises the KvrelayError of a request that failed."""
        if self.error is not None:
            raise self.error
        assert self._generation is not None, "an answer is read to its end"
        return self._generation

    @property
    def text(self) -> str:
        """The text of a whole answer; empty when the request failed."""
        return "" if self.error is not None else self.generation.text


async def read(
    stream: AsyncGenerationStream, *, sent_s: float | None = None, on_token: Callable[[Token], None] = lambda _: None
) -> Answer:
    """Read a stream to its end; `sent_s` on `time.perf_counter` is now by default, and a failure stays in the answer.

    `on_token` is called with every token.
    """
    answer = Answer(sent_s=time.perf_counter() if sent_s is None else sent_s)
    try:
        async with stream:
            async for event in stream:
                if isinstance(event, Token):
                    answer.stamps_s.append(time.perf_counter())
                    on_token(event)
            answer._generation = await stream.result()  # noqa: SLF001 - nothing else fills an answer in
    except KvrelayError as error:
        answer.error = error
    return answer


async def closed_loop(ask: Callable[[_T], Awaitable[object]], items: Iterable[_T], *, concurrency: int) -> None:
    """Ask for all items, so many at a time: the next one begins when one has ended."""
    rest = iter(items)

    async def place() -> None:
        for item in rest:
            await ask(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(place())


def story(client: AsyncClient, number: int, *, num_tokens: int, num_repeats: int = 6) -> AsyncGenerationStream:
    """Ask for a story of sampled tokens: request `number` always has the same prompt and seed, and so the same text.

    `num_repeats`: length of the prompt, in sentences.
    """
    prompt = _STORY.format(number) * num_repeats
    return client.stream_chat(prompt, temperature=0.8, seed=number, max_tokens=num_tokens, ignore_eos=True)


def differences(disturbed: Iterable[Answer], undisturbed: Sequence[Answer]) -> tuple[list[str], int]:
    """Return what the disturbed requests failed with, and how many texts differ from those of the undisturbed ones."""
    pairs = list(zip(disturbed, undisturbed, strict=True))
    failures = [f"{type(one.error).__name__}: {one.error}" for one, _ in pairs if one.error is not None]
    return failures, sum(one.text != other.text for one, other in pairs if one.error is None)
