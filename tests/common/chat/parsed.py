"""Whole messages out of pushes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common.chat.formats import TOOL_FORMATS
from common.chat.parsing import MessageParser

MARKS = tuple(TOOL_FORMATS)
"""Names of the tool formats."""


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each."""


def parse(pieces: Iterable[str], **options: Any) -> Message:
    parser = MessageParser(**{"tools": None, "reasoning": None} | options)
    message = Message()
    for delta in (*(parser.push(piece) for piece in pieces), parser.finish()):
        message.content += delta.content
        message.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index == len(message.calls):
                assert call.name, "the first delta of a call names it"
                message.calls.append((call.name, call.arguments))
            else:
                assert (call.index, call.name) == (len(message.calls) - 1, None)
                name, arguments = message.calls[-1]
                message.calls[-1] = (name, arguments + call.arguments)
    return message


def split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]
