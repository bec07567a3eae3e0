"""Grammars of answers with tool calls and with thinking, as Lark sources for llguidance (engine/grammar.py).

Every function here is pure. Llguidance never lets text stand for a token that the tokenizer keeps apart (an added
token), nor the other way round, unless nothing else may follow. So `token_ids` gives the ids of the markers that are
tokens of the model's tokenizer (`{marker: id}`, of common/chat/formats.py's MARKERS); other markers are written as
text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat
from common.schemas import compilable, guided, listed
from common.structured_outputs import Structure

Tool = Mapping[str, Any]
Function = Mapping[str, Any]
Functions = Sequence[Function]
TokenIds = Mapping[str, int]

NO_TOKENS: TokenIds = {}
# Spaced as chat templates write calls: where space is free, a model may write it forever.
_JSON_OPTIONS = {
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    format_name: str | None,
    tools: Sequence[Tool],
    *,
    name: str | None,
    parallel: bool,
    token_ids: TokenIds = NO_TOKENS,
) -> str:
    """Return the grammar of an answer that is tool calls, one or (`parallel`) more, whose arguments fit their tools.

    Calls are of any of the tools (OpenAI's `{"type": "function", "function": {…}}`), or of the one that `name` names.
    Without a format, the answer is the bare arguments of the named tool. Raises KeyError for an unknown format and
    ValueError for tools that cannot be called.
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        raise ValueError("there is no tool to call" if name is None else f"there is no tool {name!r}")
    rules = _Rules(token_ids)
    if format_name is None:
        if name is None:
            raise ValueError("this model's chat template has no known format of tool calls; name the tool to call")
        rules.add("start", rules.arguments(functions[0]))
        return rules.lark
    start, call, separator = _MARKUPS[format_name](functions, rules)
    calls = f"call ({separator} call)*" if parallel else "call"
    rules.add("start", start.format(calls=calls))
    rules.add("call", call)
    return rules.lark


def after_reasoning(
    lark: str, reasoning: str, *, in_reasoning: bool, max_tokens: int | None, token_ids: TokenIds = NO_TOKENS
) -> str:
    """Return the grammar of thinking followed by an answer that follows the grammar `lark`.

    Thinking has at most `max_tokens` tokens; after these only its closing tag may follow. With `in_reasoning` the
    prompt has opened the thinking; otherwise the answer may leave it out. Raises ValueError if there is a limit and
    the closing tag is not a token.
    """
    rules = _Rules(token_ids)
    rules.add("start", "thinking newlines? answer" if in_reasoning else "(thinking newlines?)? answer")
    rules.add_thinking(REASONING_FORMATS[reasoning], in_reasoning=in_reasoning, max_tokens=max_tokens)
    rules.add("newlines", "/\\n{1,2}/")
    rules.add("answer", f"%lark {{\n{lark}\n}}")
    return rules.lark


def limited_reasoning(reasoning: str, *, in_reasoning: bool, max_tokens: int, token_ids: TokenIds) -> str:
    """Return the grammar of at most `max_tokens` tokens of thinking, followed by any answer. Raises ValueError.

    The answer may hold every token but the one that opens thinking.
    """
    markup = REASONING_FORMATS[reasoning]
    if markup.open not in token_ids:
        raise ValueError(f"cannot limit thinking: {markup.open} is not a token of this model")
    rules = _Rules(token_ids)
    thinking = "thinking" if in_reasoning else "thinking?"
    rules.add("start", f"{thinking} <[^{token_ids[markup.open]}]>*")
    rules.add_thinking(markup, in_reasoning=in_reasoning, max_tokens=max_tokens)
    return rules.lark


def structure_lark(structure: Structure) -> str:
    """Return the Lark source of a structure, for use after thinking. Raises ValueError."""
    value = structure.value
    match structure.kind:
        case "json":
            if (texts := listed(value)) is not None:
                return _choice(texts)
            return f"start: %json {json.dumps(guided(value))}\n"
        case "json_object":
            return f"start: %json {json.dumps(guided({'type': 'object'}))}\n"
        case "regex":
            return f"start: /{_slashes_escaped(value)}/\n"
        case "choice":
            return _choice(value)
        case "structural_tag":
            raise ValueError("a structural tag cannot follow thinking; end the thinking by the template")
        case "grammar":
            return str(value)


def _choice(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(map(_text, texts)) + "\n"


class _Rules:
    """Rules of a grammar."""

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids = token_ids
        self._rules: list[str] = []

    @property
    def lark(self) -> str:
        """The source."""
        return "\n".join([*self._rules, ""])

    def add(self, name: str, body: str) -> None:
        """Add a rule or, by a name in capitals, a terminal."""
        self._rules.append(f"{name}: {body}")

    def add_new(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self.add(name, body)
        return name

    def marker(self, marker: str) -> str:
        """Return the expression of a marker: its token, or text."""
        return f"<[{self.token_ids[marker]}]>" if marker in self.token_ids else _text(marker)

    def markers(self, format_name: str) -> list[str]:
        """Return the expressions of a format's markers."""
        return [self.marker(each) for each in TOOL_FORMATS[format_name].markers]

    def arguments(self, function: Function) -> str:
        """Return the expression of a call's arguments as JSON."""
        return self.add_new(_json(_parameters(function)))

    def add_thinking(self, markup: ReasoningFormat, *, in_reasoning: bool, max_tokens: int | None) -> None:
        """Add the rule `thinking` of the thinking and its tags. Raises ValueError."""
        close = _slashes_escaped(re.escape(markup.close))
        limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
        if max_tokens == 0:
            body = self.marker(markup.close)
        elif markup.close in self.token_ids:
            # Text must not spell the closing tag either.
            self.add("THOUGHTS", f"/(?s:.*)/ & ~/(?s:.*){close}(?s:.*)/")
            self.add(f"thoughts{limit}", "THOUGHTS")
            body = f"thoughts {self.marker(markup.close)}"
        elif max_tokens is None:
            self.add("thoughts[lazy]", f"/(?s:.*){close}/")
            body = "thoughts"
        else:
            raise ValueError(f"cannot limit thinking: {markup.close} is not a token of this model")
        self.add("thinking", body if in_reasoning else f"{self.marker(markup.open)} {body}")


Markup = tuple[str, str, str]
"""The start rule with a place for calls, the rule of a call, and what stands between calls."""


def _hermes(functions: Functions, rules: _Rules) -> Markup:
    opening, closing = rules.markers("hermes")
    call = _object_call(functions, rules, before='\n{"name": "', key="arguments", after="}\n")
    return "{calls}", f"{opening} {call} {closing}", _text("\n")


def _llama3_json(functions: Functions, rules: _Rules) -> Markup:
    return "{calls}", _object_call(functions, rules, before='{"name": "', key="parameters", after="}"), _text("; ")


def _mistral(functions: Functions, rules: _Rules) -> Markup:
    opening, call_id, arguments = rules.markers("mistral")
    if "[ARGS]" in rules.token_ids:  # the tokenizers of the models that write a name and arguments
        between = f"({call_id} /[a-zA-Z0-9]{{9}}/)? {arguments}" if "[CALL_ID]" in rules.token_ids else arguments
        calls = [f"{_text(each['name'])} {between} {rules.arguments(each)}" for each in functions]
        return "{calls}", f"{opening} ({' | '.join(calls)})", ""
    call = _object_call(functions, rules, before='{"name": "', key="arguments", after="}")
    return f'{opening} " "? "[" {{calls}} "]"', call, _text(", ")


def _pythonic(functions: Functions, rules: _Rules) -> Markup:
    opening, closing = rules.markers("pythonic")
    start = '"[" {calls} "]"'
    if TOOL_FORMATS["pythonic"].opening in rules.token_ids:
        start = f"{opening} {start} {closing}"
    calls = [f"{_text(each['name'] + '(')} {_keywords(each, rules)}" for each in functions]
    return start, " | ".join(calls), _text(", ")


def _deepseek(functions: Functions, rules: _Rules) -> Markup:
    opening, begin, separator, end, closing = rules.markers("deepseek")
    named = [(each["name"], rules.arguments(each)) for each in functions]
    fenced = " | ".join(f"{_text(name + chr(10) + '```json' + chr(10))} {arguments}" for name, arguments in named)
    plain = " | ".join(f"{_text(name)} {separator} {arguments}" for name, arguments in named)
    v3 = f'"function" {separator} ({fenced}) {_text(chr(10) + "```")}'
    return f"{opening} {{calls}} {closing}", f"{begin} ({v3} | {plain}) {end}", '"\\n"?'


_MARKUPS: Mapping[str, Callable[[Functions, _Rules], Markup]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "deepseek": _deepseek,
}


def _object_call(functions: Functions, rules: _Rules, *, before: str, key: str, after: str) -> str:
    """Return the expression of a call as an object of its name and arguments."""
    between = f'", "{key}": '
    calls = " | ".join(f"{_text(each['name'] + between)} {rules.arguments(each)}" for each in functions)
    return f"{_text(before)} ({calls}) {_text(after)}"


def _parameters(function: Function) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {function['name']} are not the schema of an object")
    return {**schema, "type": "object"}


def _keywords(function: Function, rules: _Rules) -> str:
    """Return the expression of keyword arguments, in the order of the schema's properties, and the end of the call.

    The expression depends only on the schema's properties, `required` and definitions.
    """
    schema = _parameters(function)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not all(map(_is_text, required)):
        raise ValueError(f"the parameters of {function['name']} are not a JSON schema")
    definitions = {str(key): schema[key] for key in ("$defs", "definitions") if key in schema}
    if unusable := [key for key in {*properties, *required} if not key.isidentifier() or key not in properties]:
        raise ValueError(f"the parameter {min(unusable)!r} of {function['name']} cannot be passed by keyword")
    first = rest = _text(")")  # what may follow when no keyword has been, or one
    for key, value in reversed(properties.items()):
        argument = rules.add_new(f"{_text(key + '=')} {_literal(value, definitions)}")
        begun, continued = f"{argument} {rest}", f"{_text(', ')} {argument} {rest}"
        first = rules.add_new(begun if key in required else f"{begun} | {first}")
        rest = rules.add_new(continued if key in required else f"{continued} | {rest}")
    return first


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _literal(schema: Any, definitions: Mapping[str, Any]) -> str:
    """Return the expression of a Python literal that fits a schema: JSON, but for a lone True or False."""
    if not isinstance(schema, Mapping):
        return _json(schema)
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    return _json({**definitions, **schema})


def _json(schema: Any) -> str:
    schema = compilable(schema)
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashes_escaped(regex: str) -> str:
    """Return a regular expression as it stands between slashes."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")
