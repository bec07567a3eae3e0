"""Grammars of tool calls in each format, whose arguments fit the schemas of their tools."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.chat.formats import MARKERS, Syntax, Tags, ToolFormat
from common.chat.lark import Rules, pattern_of, quoted
from common.chat.named_calls import KEY_RUN
from common.chat.parameter_types import ANY_TYPE, TEXT, referred, types_of
from common.schemas import FORMATS, compilable

Function = Mapping[str, Any]
Functions = Sequence[Function]

# Spaced as chat templates write calls: where space is free, a model may write it forever.
_JSON_OPTIONS = {
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_LISTED: dict[str, Any] = {
    "begin": '{"name": "',
    "call_id": "",
    "after_name": '", "arguments": ',
    "end": "}",
    "separator": ", ",
    "is_shared": True,
}
"""Calls of a list of objects, in a format that also has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCalls:
    """Expressions of which an answer with calls is made."""

    before: str
    """What comes before all calls."""
    call: str
    separator: str
    """Text between calls."""
    after: str
    """What comes after all calls."""


def written_calls(markup: ToolFormat, functions: Functions, rules: Rules) -> WrittenCalls:
    """Return how calls of functions are written in a format. Raises ValueError for those that cannot be."""
    if markup.is_list and markup.after_name in MARKERS:
        # The tokenizers of the models that write a name and arguments have the marker as a token.
        written = {"is_list": False} if markup.after_name in rules.token_ids else _LISTED
        markup = replace(markup, **written)
    opening, closing = _markers(markup, rules)
    before, after = ('"["', '"]"') if markup.is_list or markup.syntax is Syntax.PYTHON else ("", "")
    calls = " | ".join(_named(markup, each, rules) for each in functions)
    call = f"{rules.spelled(markup.begin)} ({calls})"
    if markup.is_shared:
        before, after = f"{opening} {before}", f"{after} {closing}"
    else:
        call = f"{opening} {call} {closing}"
    return WrittenCalls(before=before, call=call, separator=markup.separator, after=after)


def json_arguments(function: Function) -> str:
    """Return the expression of a call's arguments as a JSON object. Raises ValueError."""
    return _json(_parameters(function))


def _markers(markup: ToolFormat, rules: Rules) -> tuple[str, str]:
    """Return the expressions of the markers around calls; empty where an answer does without them."""
    match markup.syntax:
        case Syntax.CHANNELS:
            return "", ""  # the prompt has begun the message, and what ends it ends the answer
        case Syntax.PYTHON if markup.opening not in rules.token_ids:
            return "", ""
        case Syntax.OBJECT if markup.bare:
            return "", ""
    return rules.spelled(markup.opening), rules.spelled(markup.closing)


def _named(markup: ToolFormat, function: Function, rules: Rules) -> str:
    """Return the expression of a call from its name on."""
    name = markup.namespace + function["name"]
    if markup.syntax is Syntax.PYTHON:
        return f"{quoted(name + '(')} {_keywords(function, rules)}"
    call_id = f"{rules.spelled(markup.call_id)} /{markup.id_pattern}/" if markup.call_id else ""
    if markup.call_id in MARKERS:  # models of some tokenizers leave it out
        call_id = f"({call_id})?" if markup.call_id in rules.token_ids else ""
    begun = f"{quoted(name)} {call_id} {rules.spelled(markup.after_name)}"
    if markup.tags is not None:
        return f"{begun} {_tagged(markup, markup.tags, function, rules)}"
    return f"{begun} {rules.add_new(json_arguments(function))} {rules.spelled(markup.end)}"


def _parameters(function: Function) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {function['name']} are not the schema of an object")
    return {**schema, "type": "object"}


def _keywords(function: Function, rules: Rules) -> str:
    """Return the expression of keyword arguments and the end of the call."""

    def argument(key: str, schema: Any, root: Mapping[str, Any]) -> str:
        if not key.isidentifier():
            raise ValueError(f"the parameter {key!r} of {function['name']} cannot be passed by keyword")
        return f"{quoted(key + '=')} {_literal(schema, _definitions(root))}"

    return _in_order(function, rules, argument, separator=quoted(", "), end=quoted(")"))


def _tagged(markup: ToolFormat, tags: Tags, function: Function, rules: Rules) -> str:
    """Return the expression of arguments in tags and the end of the call."""

    def argument(key: str, schema: Any, root: Mapping[str, Any]) -> str:
        if not KEY_RUN.fullmatch(key):
            raise ValueError(f"the parameter {key!r} of {function['name']} cannot be written in {markup.name}'s tags")
        try:
            values = _plain_values(schema, root, tags, rules, set())
        except ValueError as error:
            raise ValueError(f"the parameter {key!r} of {function['name']} {error}") from None
        return f"{rules.spelled(tags.key + key + tags.value)} ({' | '.join(values)})"

    return _in_order(function, rules, argument, separator="", end=rules.spelled(markup.end) or quoted(""))


def _in_order(
    function: Function,
    rules: Rules,
    argument: Callable[[str, Any, Mapping[str, Any]], str],
    *,
    separator: str,
    end: str,
) -> str:
    """Return the expression of arguments in the order of the schema's properties, and of the end of the call.

    The expression depends only on the schema's properties, `required` and definitions.
    """
    schema = _parameters(function)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not all(map(_is_text, required)):
        raise ValueError(f"the parameters of {function['name']} are not a JSON schema")
    if missing := set(required) - set(properties):
        raise ValueError(f"the parameter {min(missing)!r} of {function['name']} is required, but has no schema")
    first = rest = end  # what may follow when no argument has been, or one
    for key, value in reversed(properties.items()):
        written = rules.add_new(argument(key, value, schema))
        begun, continued = f"{written} {rest}", f"{separator} {written} {rest}"
        first = rules.add_new(begun if key in required else f"{begun} | {first}")
        rest = rules.add_new(continued if key in required else f"{continued} | {rest}") if separator else first
    return first


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _literal(schema: Any, definitions: Mapping[str, Any]) -> str:
    """Return the expression of a Python literal that fits a schema: JSON, but for a lone True or False."""
    if not isinstance(schema, Mapping):
        return _json(schema)
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    return _json({**definitions, **schema})


def _plain_values(schema: Any, root: Mapping[str, Any], tags: Tags, rules: Rules, followed: set[str]) -> list[str]:
    """Return the expressions of values in tags that fit a schema, each with its end. Raises ValueError.

    A reference that has been followed adds nothing.
    """
    if not isinstance(schema, Mapping):
        return [_plain_text({}, tags, rules)]
    types, end = types_of(schema, root), rules.spelled(tags.end)
    if "string" not in types:
        return [f"{rules.add_new(_json({**_definitions(root), **schema}))} {end}"]
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [f"{quoted(each if _is_text(each) else json.dumps(each))} {end}" for each in values]
    if isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return []
        followed.add(reference)
        return _plain_values(referred(reference, root), root, tags, rules, followed)
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list):
            return [each for branch in branches for each in _plain_values(branch, root, tags, rules, followed)]
    found = [_plain_text(schema, tags, rules)]
    if types != ANY_TYPE and (others := types - TEXT):
        json_value = _json({**_definitions(root), **schema, "type": sorted(others)})
        found.append(f"{rules.add_new(json_value)} {end}")
    return found


def _plain_text(schema: Mapping[str, Any], tags: Tags, rules: Rules) -> str:
    """Return the expression of a text that fits a schema, and of its end. Raises ValueError."""
    if "pattern" in schema or schema.get("format") in FORMATS:
        raise ValueError("cannot be forced: plain text keeps to no pattern or format; leave it out, or use auto")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = rf"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
    close = tags.end.strip()
    closed = pattern_of(close)
    name = f"TEXT_{rules.num_rules}"
    if close in rules.token_ids:
        rules.add(name, f"/{text}/ & ~/(?s:.*){closed}(?s:.*)/")
        return f"{name} {rules.spelled(tags.end)}"
    end = pattern_of(tags.end)
    rules.add(name, f"/{text}{end}/ & ~/(?s:.*){closed}(?s:.*){end}/")
    return rules.add_new(name, attribute="[lazy]")


def _json(schema: Any) -> str:
    schema = compilable(schema)
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"
