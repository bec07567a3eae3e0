"""Turns values into JSON in parts that take some milliseconds each, since nothing interrupts the encoder."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PART_VALUES = 2048
"""Most values in one part, unless a single text is longer."""
_SLICE_ITEMS = 64
_CHARS_PER_VALUE = 64
"""Characters of a text that cost as much as another value."""

quote = json.JSONEncoder().encode
"""Returns the JSON of one value; for text this is one call into C."""


def json_parts(value: Any) -> Iterator[str]:
    """Yield the JSON of a value; joined, the parts are what `quote` returns."""
    if _weight(value) <= PART_VALUES:
        yield quote(value)
    elif isinstance(value, dict):
        for position, (name, member) in enumerate(value.items()):
            yield f"{', ' if position else '{'}{quote(name)}: "
            yield from json_parts(member)
        yield "}"
    elif isinstance(value, list):
        yield "["
        yield from joined_parts(_slices(value))
        yield "]"
    else:
        yield quote(value)


def members_parts(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON of an object that is not empty, without its opening brace."""
    parts = json_parts(value)
    yield next(parts)[1:]
    yield from parts


def merged_parts(slices: Iterable[Mapping[str, list[Any] | None]]) -> Iterator[str]:
    """Yield the JSON of an object whose lists come in slices, such as the log-probabilities of many tokens.

    The parts are empty while the slices are made, so that their maker gives way between them.
    """
    members: dict[str, list[str] | None] = {}
    for each in slices:
        for name, items in each.items():
            texts = members.setdefault(name, None if items is None else [])
            if texts is not None and items:
                texts.append(quote(items)[1:-1])
        yield ""
    for position, (name, texts) in enumerate(members.items()):
        yield f"{', ' if position else '{'}{quote(name)}: "
        yield "null" if texts is None else f"[{', '.join(texts)}]"
    yield "}"


def joined_parts(lists: Iterable[list[Any]]) -> Iterator[str]:
    """Yield the JSON of all items of the lists, which are not empty, without the brackets of a list."""
    for position, items in enumerate(lists):
        if position:
            yield ", "
        if len(items) == 1:
            yield from json_parts(items[0])
        else:
            yield quote(items)[1:-1]


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """Yield the items in lists of at most `PART_VALUES` values; those of heavier lists alone."""
    for start in range(0, len(items), _SLICE_ITEMS):
        slice_ = items[start : start + _SLICE_ITEMS]
        if _weight(slice_) <= PART_VALUES:
            yield slice_
        else:
            yield from ([item] for item in slice_)


def _weight(value: Any) -> int:
    """Return the number of values in a value, counted up to a little more than `PART_VALUES`."""
    waiting, total = [value], 0
    while waiting and total <= PART_VALUES:
        each = waiting.pop()
        total += 1
        if isinstance(each, str):
            total += len(each) // _CHARS_PER_VALUE
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            if len(each) > PART_VALUES:
                return PART_VALUES + 1
            waiting.extend(each)
    return total
