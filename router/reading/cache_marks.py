"""Finds how many tokens of a prompt are before each of its cache marks.

A template writes a conversation as it likes, so marks are found in what it wrote: it renders the conversation once more
with a character of its own at each marked place of a message, and once with other tools behind each marked one. A mark
reaches as far as both texts agree, and its tokens are those of the prompt that lie in this part of the text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from common.chat_template import Conversation
from common.errors import InvalidRequest
from common.wire import MAX_CACHE_TTL_S
from kvrelay.v1 import inference_pb2 as pb
from router.reading.codec import Codec, num_alike
from router.reading.conversation import ChatFormats, num_tools, read_conversation
from router.reading.token_cache import Encoded

_SIGNS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that no text needs: Unicode gives them no meaning."""
_KINDS = {"token_ids": ("num_tokens",), "text": ("num_chars",), "chat": ("num_tools", "message")}
"""How the place of a mark may be given, by the kind of prompt."""


def check_marks(message: pb.GenerateRequest) -> None:
    """Raise InvalidRequest for a mark whose time or place cannot be."""
    for position, mark in enumerate(message.cache_marks):
        field = f"cache_marks[{position}]"
        if not 0 < mark.ttl_s <= MAX_CACHE_TTL_S:
            raise InvalidRequest(
                f"ttl_s is {mark.ttl_s:g}; allowed are 0 to {MAX_CACHE_TTL_S:g} seconds", field=f"{field}.ttl_s"
            )
        kind = mark.WhichOneof("end")
        if kind is not None and kind not in _KINDS[message.WhichOneof("prompt") or "text"]:
            raise InvalidRequest("is no place in such a prompt", field=f"{field}.{kind}")
        if kind == "message" and mark.message.index >= len(message.chat.messages):
            raise InvalidRequest(
                f"there is no message {mark.message.index}; the first is 0", field=f"{field}.message.index"
            )


class MarkFinder:
    """Finds the marks of one request in its prompt. Any thread."""

    def __init__(self, codec: Codec, message: pb.GenerateRequest, encoded: Encoded) -> None:
        """`encoded`: the whole prompt."""
        self._codec = codec
        self._message = message
        self._encoded = encoded

    def in_prompt(self) -> list[tuple[int, float]]:
        """Return the leading tokens and the time of each mark of a text, of token ids, or of what is left of a prompt.

        When its beginning is cut off, a mark inside of it covers nothing.
        """
        ids, text = self._encoded.token_ids, self._message.text
        found = []
        for mark in self._message.cache_marks:
            match mark.WhichOneof("end"):
                case None:
                    num_tokens = len(ids)
                case _ if self._encoded.is_cut:
                    num_tokens = 0
                case "num_tokens":
                    num_tokens = min(mark.num_tokens, len(ids))
                case _:
                    num_tokens = num_alike(ids, self._codec.encode_now(text[: mark.num_chars]))
            found.append((num_tokens, mark.ttl_s))
        return found

    def in_chat(
        self, conversation: Conversation, formats: ChatFormats, render: Callable[[Conversation], str]
    ) -> list[tuple[int, float]]:
        """Return the leading tokens and the time of each mark of a conversation, as it was read."""
        text, ids = self._encoded.text, self._encoded.token_ids
        marks, ends = self._message.cache_marks, [len(text)] * len(self._message.cache_marks)
        placed: dict[int, tuple[int, int]] = {}
        for number, mark in enumerate(marks):
            match mark.WhichOneof("end"):
                case "num_tools":
                    ends[number] = self._end_of_tools(mark.num_tools, conversation, render)
                case "message" if (place := _place_of(mark.message, self._message.chat.messages)) is not None:
                    placed[number] = place
        if placed:
            ends_in_text = self._ends_of(placed, formats, render)
            for number in placed:
                ends[number] = ends_in_text.get(number, 0)
        return [
            (len(ids) if end == len(text) else self._codec.num_leading_tokens(text, end, ids), mark.ttl_s)
            for mark, end in zip(marks, ends, strict=True)
        ]

    def _end_of_tools(self, num_marked: int, conversation: Conversation, render: Callable[[Conversation], str]) -> int:
        """Return the characters up to the end of the first tools; 0 where the template writes none."""
        tools, text = conversation.tools, self._encoded.text
        num_told = min(num_tools(self._message.chat.tools[:num_marked]), len(tools))
        if not num_told:
            return 0
        others = tools[:num_told] if num_told < len(tools) else (*tools, tools[-1])
        try:
            end = num_alike(text, render(replace(conversation, tools=others)))
        except InvalidRequest:
            return 0
        return 0 if end == len(text) else end

    def _ends_of(
        self, placed: dict[int, tuple[int, int]], formats: ChatFormats, render: Callable[[Conversation], str]
    ) -> dict[int, int]:
        """Return the characters before places of (message, character), by their keys; without those not written."""
        text = self._encoded.text
        signs = dict(zip(placed, (sign for sign in _SIGNS if sign not in text), strict=False))
        chat = pb.ChatPrompt()
        chat.CopyFrom(self._message.chat)
        for number, (index, num_chars) in sorted(placed.items(), key=lambda item: item[1], reverse=True):
            content = chat.messages[index].content
            chat.messages[index].content = content[:num_chars] + signs.get(number, "") + content[num_chars:]
        try:
            signed = render(read_conversation(chat, formats))
        except InvalidRequest:
            return {}
        remove = str.maketrans(dict.fromkeys(signs.values()))
        ends = {number: signed.find(sign) for number, sign in signs.items()}
        return {number: num_alike(text, signed[:end].translate(remove)) for number, end in ends.items() if end >= 0}


def _place_of(end: pb.MessageEnd, messages: Sequence[pb.ChatMessage]) -> tuple[int, int] | None:
    """Return the message, and the characters of its content, behind which the mark is; None: the end of the prompt.

    Templates cut off spaces at both ends of a content, and say nothing of an empty one.
    """
    content = messages[end.index].content
    if end.HasField("num_chars") or not messages[end.index].tool_calls:
        kept = content[: end.num_chars] if end.HasField("num_chars") else content
        if kept.strip():
            return end.index, len(kept.rstrip())
        if end.HasField("num_chars") and content.strip():
            return end.index, _num_spaces(content)
    return next(_beginnings(end.index + 1, messages), None)


def _beginnings(first: int, messages: Sequence[pb.ChatMessage]) -> Iterator[tuple[int, int]]:
    """Yield the places of the first words of messages from one on."""
    for index in range(first, len(messages)):
        if messages[index].content.strip():
            yield index, _num_spaces(messages[index].content)


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())
