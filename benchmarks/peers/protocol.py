"""Protocol between a benchmark and an arm: one JSON object a line, over the arm's stdin and stdout.

    arm -> benchmark   {"ready": {...}}                                    once, when the model is loaded
    benchmark -> arm   {"prompts": [[id, ...], ...], "max_tokens": n}      generate, greedily, ignoring end-of-text
    arm -> benchmark   {"outputs": [{"token_ids": [...], "times_s": [...]}, ...]}   or {"error": "..."}

times_s[i] is when token i reached the arm's caller, in seconds since the request was read. End of input ends the arm.
Standard library only: arms import this under a peer's interpreter.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True, kw_only=True)
class Output:
    """One request's answer."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Time of each token since the start of the request."""


Stream = Iterable[tuple[int, int]]
"""(index of the prompt, token id), as the engine hands tokens out."""
Generate = Callable[[Prompts, int], Stream]
"""Starts generating up to that many tokens for each prompt."""


def claim_stdout() -> TextIO:
    """Return the real standard output for replies and send everything else that prints to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def serve(replies: TextIO, generate: Generate, about: dict[str, Any]) -> None:
    """Answer requests until the input ends. `about` is sent once: versions, threads, what computes."""
    _reply(replies, {"ready": about})
    for line in sys.stdin:
        started_s = time.perf_counter()
        request = json.loads(line)
        outputs = [Output() for _ in request["prompts"]]
        try:
            for index, token_id in generate(request["prompts"], request["max_tokens"]):
                outputs[index].token_ids.append(token_id)
                outputs[index].times_s.append(time.perf_counter() - started_s)
        except Exception as error:  # noqa: BLE001 - the top of a request: the benchmark reports it and decides
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})
        else:
            _reply(replies, {"outputs": [asdict(output) for output in outputs]})


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
