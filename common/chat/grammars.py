"""Grammars of answers with tool calls, with thinking, or with both. Every function here is pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.chat.call_grammars import json_arguments, written_calls
from common.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, Syntax
from common.chat.lark import NO_TOKENS, Rules, TokenIds, pattern_of, quoted, slashes_escaped
from common.schemas import guided, listed
from common.structured_outputs import Structure

Tool = Mapping[str, Any]


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
    rules = Rules(token_ids)
    if format_name is None:
        if name is None:
            raise ValueError("this model's chat template has no known format of tool calls; name the tool to call")
        rules.add("start", json_arguments(functions[0]))
        return rules.lark
    markup = TOOL_FORMATS[format_name]
    written = written_calls(markup, functions, rules)
    several = parallel and markup.syntax is not Syntax.CHANNELS
    calls = f"call ({rules.spelled(written.separator)} call)*" if several else "call"
    rules.add("start", f"{written.before} {calls} {written.after}")
    rules.add("call", written.call)
    return rules.lark


def after_reasoning(
    lark: str,
    reasoning: str,
    *,
    is_content: bool,
    in_reasoning: bool,
    max_tokens: int | None,
    token_ids: TokenIds = NO_TOKENS,
) -> str:
    """Return the grammar of thinking followed by an answer, content or calls, that follows the grammar `lark`.

    Thinking has at most `max_tokens` tokens; after these only its closing tag may follow. With `in_reasoning` the
    prompt has opened the thinking; otherwise the answer may leave it out. Raises ValueError if there is a limit and
    the closing tag is not a token.
    """
    rules = Rules(token_ids)
    rules.add("start", "thinking newlines? answer" if in_reasoning else "(thinking newlines?)? answer")
    markup = REASONING_FORMATS[reasoning]
    _add_thinking(rules, markup, in_reasoning=in_reasoning, max_tokens=max_tokens)
    rules.add("newlines", "/\\n{1,2}/")
    before = rules.spelled(markup.content if is_content else "")
    rules.add("answer", f"{before} %lark {{\n{lark}\n}}")
    return rules.lark


def limited_reasoning(reasoning: str, *, in_reasoning: bool, max_tokens: int, token_ids: TokenIds) -> str:
    """Return the grammar of at most `max_tokens` tokens of thinking, followed by any answer. Raises ValueError.

    The answer may hold every token but the one that opens thinking.
    """
    markup = REASONING_FORMATS[reasoning]
    if markup.in_channels:
        raise ValueError(f"cannot limit thinking: {reasoning} thinks in several messages; leave out the limit")
    if markup.open not in token_ids:
        raise ValueError(f"cannot limit thinking: {markup.open} is not a token of this model")
    rules = Rules(token_ids)
    thinking = "thinking" if in_reasoning else "thinking?"
    rules.add("start", f"{thinking} <[^{token_ids[markup.open]}]>*")
    _add_thinking(rules, markup, in_reasoning=in_reasoning, max_tokens=max_tokens)
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
            return f"start: /{slashes_escaped(value)}/\n"
        case "choice":
            return _choice(value)
        case "structural_tag":
            raise ValueError("a structural tag cannot follow thinking; end the thinking by the template")
        case "grammar":
            return str(value)


def _choice(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(map(quoted, texts)) + "\n"


def _add_thinking(rules: Rules, markup: ReasoningFormat, *, in_reasoning: bool, max_tokens: int | None) -> None:
    """Add the rule `thinking` of the thinking and its tags. Raises ValueError."""
    close = markup.close
    pattern = pattern_of(close)
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    if max_tokens == 0:
        body = rules.spelled(close)
    elif close in rules.token_ids:
        # Text must not spell the closing tag either.
        rules.add("THOUGHTS", f"/(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/")
        rules.add(f"thoughts{limit}", "THOUGHTS")
        body = f"thoughts {rules.spelled(close)}"
    elif max_tokens is None:
        rules.add("thoughts[lazy]", f"/(?s:.*){pattern}/")
        body = "thoughts"
    else:
        raise ValueError(f"cannot limit thinking: {close} is not a token of this model")
    body = f"{body} {rules.spelled(markup.answer)}"
    rules.add("thinking", body if in_reasoning else f"{rules.spelled(markup.open)} {body}")
