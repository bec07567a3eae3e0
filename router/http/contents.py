"""What the conversations of every API are made of: lists of objects, whose members are texts or lists of parts.

Everything here raises InvalidRequest that names the place in the body.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS, check_length
from router.http.strict import field_path

MAX_KIND_CHARS = 40


def entries_in(given: Any, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages or items of a conversation, with their places; there is at least one."""
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{field} must be a list of at least one object", field=field)
    check_length(len(given), MAX_CHAT_MESSAGES, field=field)
    for position, each in enumerate(given):
        where = field_path(field, position)
        if not isinstance(each, dict):
            raise InvalidRequest(f"{where} must be an object", field=where)
        yield where, each


def role_in(message: Mapping[str, Any], where: str, roles: Collection[str]) -> str:
    """Return the role of a message, one of these."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(roles)}", field=f"{where}.role")
    return role


def text_in(given: Mapping[str, Any], name: str, where: str, *, default: str | None = None) -> str:
    """Return a member that is text; with a default it may be null, or left out."""
    value = given.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", field=f"{where}.{name}")
    return value


def parts_in(content: Any, where: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield place, type and members of each part of some content."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of parts", field=where)
    check_length(len(content), MAX_CONTENT_PARTS, field=where)
    for position, part in enumerate(content):
        here = field_path(where, position)
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{here} must be an object with a type", field=here)
        yield here, kind, part


def joined_texts(content: Any, where: str, kinds: Collection[str], *, is_result: bool = False) -> str:
    """Return the text of all parts, which are of these types; in the result of a tool others are named instead."""
    texts: list[str] = []
    for here, kind, part in parts_in(content, where):
        if is_result and kind not in kinds:
            texts.append(unseen(kind))
            continue
        text = part.get("text") if kind in kinds else None
        if not isinstance(text, str):
            wanted = " or ".join(f'"{each}"' for each in kinds)
            raise InvalidRequest(
                f'{here} must be {{"type": {wanted}, "text": …}}; nothing else is supported', field=here
            )
        texts.append(text)
    return "\n".join(texts)


def unseen(kind: str) -> str:
    """Return what a model reads in place of a part of a tool's result that is not text: the client cannot change it."""
    return f"[{kind[:MAX_KIND_CHARS]}: not shown, the model reads text only]"
