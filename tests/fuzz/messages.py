"""Messages out of decisions: a good one, a good one with some fields changed, one out of its descriptor, or raw bytes.

Values are biased to those that mean something (`Hints`, by the field's name) and to boundaries. A few decisions can
make a large message: a field repeated thousands of times, a string of a megabyte.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")


class Source:
    """Reads decisions from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_empty(self) -> bool:
        """Whether only zeros are left."""
        return self._position >= len(self._data)

    def byte(self) -> int:
        """Return the next byte."""
        if self.is_empty:
            return 0
        self._position += 1
        return self._data[self._position - 1]

    def below(self, limit: int) -> int:
        """Return a number from 0 to limit - 1, at most 2**16."""
        return self.byte() % limit if limit <= 256 else (self.byte() << 8 | self.byte()) % limit

    def integer(self, num_bytes: int) -> int:
        """Return an unsigned integer."""
        return int.from_bytes(self.take(num_bytes), "little")

    def choose(self, values: Sequence[T]) -> T:
        """Return one of the values."""
        return values[self.below(len(values))]

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes, with zeros after the end."""
        taken = self._data[self._position : self._position + num_bytes]
        self._position += num_bytes
        return taken.ljust(num_bytes, b"\0")

    def rest(self) -> bytes:
        """Return everything that is left."""
        rest, self._position = self._data[self._position :], len(self._data)
        return rest


Field: TypeAlias = Any
"""A FieldDescriptor; the two implementations of protobuf have no type in common."""
Hints = Mapping[str, Sequence[Any]]
"""Values that mean something, by the name of a field."""

_INTEGERS = (0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 257, 1024, 65535, 2**31 - 1, 2**32 - 1, 2**64 - 1)
_DOUBLES = (0.0, 1.0, 0.5, -1.0, 1e-9, 2.0, 10.0, 60.0, 3600.0, 1e9, 1e308, 5e-324, math.nan, math.inf, -math.inf, -0.0)
_STRINGS = ("", "x", "user", "ä", "\0", "😀", "a b\n", "x" * 257, "ab" * 5_000, "e" * 300_000)
_BYTES = (
    b"",
    b"\0",
    b"\xff" * 15,
    b"\0" * 16,
    b"\1\0\0\0",
    b"a\0\0\0" * 40,
    b"\xff\xff\xff\xff",
    b"k" * 32,
    b"h" * 80_000,
)
_COUNTS = (1, 2, 3, 17, 65, 1_025, 20_000)
_BITS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
MAX_BYTES = 4 << 20
"""Larger messages never come past gRPC (`router.max_message_mib`)."""
_MAX_DEPTH = 4
_MAX_CHANGES = 6


def draw(source: Source, templates: Sequence[Message], hints: Hints) -> bytes:
    """Return a message like one of the templates as bytes, more or less mutilated."""
    message = type(templates[0])()
    template = source.choose(templates)
    match source.byte() % 8:
        case 7:
            return source.take(source.below(64))
        case 6:
            return mangled(template.SerializeToString(), source)
        case 5 if source.byte() < 224:
            _fill(message, source, hints, depth=0)
        case 5:
            message.CopyFrom(template)
            _enlarge(message, source, hints)
        case _:
            message.CopyFrom(template)
            for _ in range(source.below(_MAX_CHANGES)):
                _change(message, source, hints, depth=0)
    return message.SerializeToString() if message.ByteSize() <= MAX_BYTES else template.SerializeToString()


def mangled(raw: bytes, source: Source) -> bytes:
    """Return bytes with a few places overwritten, cut out or repeated."""
    changed = bytearray(raw)
    for _ in range(1 + source.below(4)):
        place = source.below(len(changed) + 1)
        match source.byte() % 4:
            case 0:
                changed[place : place + 1] = bytes([source.byte()])
            case 1:
                del changed[place : place + 1 + source.below(8)]
            case 2:
                changed[place:place] = source.take(source.below(8))
            case _:
                changed[place:place] = changed[: 1 + source.below(32)]
    return bytes(changed)


def _fill(message: Message, source: Source, hints: Hints, *, depth: int) -> None:
    """Set some of the fields."""
    for field in message.DESCRIPTOR.fields:
        if source.byte() >= 128:
            _set(message, field, source, hints, depth=depth)


def _change(message: Message, source: Source, hints: Hints, *, depth: int) -> None:
    """Change one field, of this message or of one inside it."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field: Field = source.choose(fields)
    action = source.byte() % 8
    if action == 0:
        message.ClearField(field.name)
    elif action < 6 and field.message_type is not None and not _is_map(field) and depth < _MAX_DEPTH:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            _change(inner, source, hints, depth=depth + 1)
        elif inner:
            _change(source.choose(inner), source, hints, depth=depth + 1)
        else:
            _change(inner.add(), source, hints, depth=depth + 1)
    else:
        _set(message, field, source, hints, depth=depth)


def _set(message: Message, field: Field, source: Source, hints: Hints, *, depth: int) -> None:
    if depth >= _MAX_DEPTH:
        return
    if _is_map(field):
        _set_map(getattr(message, field.name), field.message_type, source, hints)
    elif field.message_type is None:
        if field.is_repeated:
            values = [_value(field, source, hints) for _ in range(1 + source.below(3))]
            size = sum(len(value) if isinstance(value, str | bytes) else 1 for value in values)
            getattr(message, field.name).extend(values * _times(source, size))
        else:
            setattr(message, field.name, _value(field, source, hints))
    elif field.is_repeated:
        inner = getattr(message, field.name)
        made = inner.add()
        _fill(made, source, hints, depth=depth + 1)
        inner.extend([made] * (_times(source, made.ByteSize()) - 1))
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _fill(inner, source, hints, depth=depth + 1)


def _enlarge(message: Message, source: Source, hints: Hints) -> None:
    """Make one field, of this message or of one inside it, as large as a message may be."""
    growing = list(_growing(message))
    if not growing:
        return
    holder, field = source.choose(growing)
    room = MAX_BYTES - message.ByteSize() - 100
    value = getattr(holder, field.name)
    if field.message_type is None and not field.is_repeated:
        unit = "x" if field.type == FieldDescriptor.TYPE_STRING else source.choose((b"\1\0\0\0", b"\xff"))
        setattr(holder, field.name, unit * (room // len(unit)))
    elif _is_map(field):  # the one that there is has numbers for keys
        for number in range(room // 16):
            value[number] = 1.0
    elif field.message_type is not None:
        one = value[0] if value else value.add()
        value.extend([one] * (room // (one.ByteSize() + 5)))
    else:
        made = _value(field, source, hints)
        size = len(made) + 5 if isinstance(made, str | bytes) else 4 if field.type in _FLOATS else 1
        value.extend([made] * (room // size))


def _growing(message: Message) -> Iterator[tuple[Any, Field]]:
    """Yield the fields that can be large, with the messages that hold them."""
    fields: Sequence[Field] = message.DESCRIPTOR.fields
    for field in fields:
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield message, field
        inner = getattr(message, field.name)
        if field.message_type is None or _is_map(field):
            continue
        if field.is_repeated:
            yield from (found for each in inner[:1] for found in _growing(each))
        elif message.HasField(field.name):
            yield from _growing(inner)


def _times(source: Source, num_bytes: int) -> int:
    """Return how often something of a size is to be repeated."""
    count = source.choose(_COUNTS)
    if count == _COUNTS[-1] and source.byte() >= 192:
        count = MAX_BYTES
    return min(count, 1 + MAX_BYTES // (num_bytes + 2))


def _set_map(entries: Any, entry: Any, source: Source, hints: Hints) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(1 + source.below(3)):
        entries[_value(key, source, hints)] = _value(value, source, hints)
    if source.byte() > 250 and key.type in _BITS:
        for number in range(source.choose(_COUNTS)):
            entries[number] = _value(value, source, {})


def _value(field: Field, source: Source, hints: Hints) -> Any:
    hinted = [value for value in hints.get(field.name, ()) if isinstance(value, _kinds(field))]
    way = source.byte() % 4
    if hinted and way < 2:
        return source.choose(hinted)
    if field.type in _BITS:
        least, most = _BITS[field.type]
        value = source.integer(4) if way == 3 else source.choose(_INTEGERS) * (-1 if source.byte() > 200 else 1)
        return min(max(value, least), most)
    if field.type in _FLOATS:
        return source.choose(_DOUBLES)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return source.byte() % 2 == 1
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.take(source.below(24)).decode("latin-1") if way == 3 else source.choose(_STRINGS)
    return source.take(source.below(64)) if way == 3 else source.choose(_BYTES)


def _kinds(field: Field) -> tuple[type, ...]:
    """Return the types of a field's values."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return (str,)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (bytes,)
    return (int, float) if field.type in _FLOATS else (int,)


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
