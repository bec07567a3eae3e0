"""What a request's marks ask of the prefix cache, and what came of them: written, pinned and refused tokens.

Tokens of a prompt are *read* when the worker that computed it had them cached, *written* when they are in a marked
prefix and were not read, and *input* otherwise. Only whole blocks are cached, and the last token of a prompt is always
computed: a mark counts as far as the blocks that an equal prompt could find.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.block_hash import num_usable_blocks
from kvrelay.v1 import inference_pb2, sequence_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMark:
    """The end of a prefix that is to stay cached."""

    num_tokens: int
    """Tokens of the whole blocks before the mark."""
    ttl_s: float
    """Seconds after the last use; no mark behind it lasts longer."""


def prompt_marks(given: Sequence[tuple[int, float]], *, num_prompt_tokens: int, block_size: int) -> list[PromptMark]:
    """Return marks of (leading tokens, seconds) by their place; those that add nothing to a longer one are left out."""
    num_usable = num_usable_blocks(num_prompt_tokens, block_size)
    marks: list[PromptMark] = []
    for num_tokens, ttl_s in sorted(given, reverse=True):
        num_blocks = min(num_tokens // block_size, num_usable)
        if num_blocks and (not marks or ttl_s > marks[-1].ttl_s):
            if marks and marks[-1].num_tokens == num_blocks * block_size:
                marks.pop()
            marks.append(PromptMark(num_tokens=num_blocks * block_size, ttl_s=ttl_s))
    return marks[::-1]


def cache_writes(marks: Sequence[PromptMark], *, num_cached_tokens: int) -> Iterator[inference_pb2.CacheWrite]:
    """Yield the written tokens by the time of their marks, each time once."""
    begin = num_cached_tokens
    for mark in marks:
        if mark.num_tokens > begin:
            yield inference_pb2.CacheWrite(ttl_s=mark.ttl_s, num_tokens=mark.num_tokens - begin)
            begin = mark.num_tokens


def cache_pins(marks: Sequence[PromptMark], *, tenant: str, max_bytes: int) -> sequence_pb2.CachePins | None:
    """Return what a worker is told; None: the tenant may pin nothing."""
    if not max_bytes:
        return None
    pins = [sequence_pb2.CachePin(num_tokens=mark.num_tokens, ttl_s=mark.ttl_s) for mark in marks]
    return sequence_pb2.CachePins(tenant=tenant, max_bytes=max_bytes, pins=pins)
