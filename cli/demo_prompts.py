"""The requests of `kvrelay demo`: each shows another part of the cluster at work."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvrelay.client import ChatMessage, SamplingOptions

ANSWER_TOKENS = 48
COPIED_TOKENS = 96
LONG_PROMPT_TOKENS = 1000
_TEMPLATE_TOKENS = 64  # more than any chat template adds around two messages

_RULES = (
    "The library opens at nine in the morning and closes"
    " at eight in the evening from Monday to Friday. On Saturday it opens at ten and closes at four in the afternoon."
    " On Sunday it is closed. A reader may borrow up to twelve books for four weeks. A loan can be renewed twice unless"
    " another reader has asked for the book. Films and music may be borrowed for one week. A late book costs twenty"
    " cents a day, but never more than five euros. Children under twelve never pay. The reading room on the second"
    " floor is silent; the café on the ground floor is not. Computers can be used for one hour a day without a card."
)
_LIBRARY = f"You are the assistant of a town library. These are its rules. {_RULES} Answer in one short sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """One request of the demo."""

    title: str
    why: str
    shown: str
    """Text that the terminal shows."""
    messages: tuple[ChatMessage, ...]
    sampling: SamplingOptions


def plain_question() -> DemoPrompt:
    """Return the simplest request."""
    return _prompt("plain question", "greedy, nothing cached yet", "What is the capital of France?")


def shared_prefix_pair() -> tuple[DemoPrompt, DemoPrompt]:
    """Return two questions behind one long system message: the second finds its KV."""
    return (
        _prompt("shared prefix 1", "a long system message", "When does it close on Saturday?", system=_LIBRARY),
        _prompt("shared prefix 2", "the same system message: cached", "How many books may I borrow?", system=_LIBRARY),
    )


def long_prompt(count_tokens: Callable[[str], int], *, max_model_len: int) -> DemoPrompt:
    """Return a prompt of at least 1,000 tokens, or of as many as the model takes: prefilled in several chunks."""
    target = min(LONG_PROMPT_TOKENS, max_model_len - ANSWER_TOKENS - _TEMPLATE_TOKENS)
    lines: list[str] = []
    while count_tokens("\n".join(lines)) < target:
        shelf = len(lines)
        lines += [
            f"Shelf {shelf + i} holds {(shelf + i) * 7 % 40 + 2} books on {_SUBJECTS[(shelf + i) % len(_SUBJECTS)]}."
            for i in range(8)
        ]
    # the last batch of lines may overshoot a small model
    while len(lines) > 1 and count_tokens("\n".join(lines[:-1])) >= target:
        lines.pop()
    question = "Which subjects does this list name? Answer with a short list."
    return DemoPrompt(
        title="long prompt",
        why="read in chunks, pulled meanwhile",
        shown=f"[{len(lines)} lines of an inventory] {question}",
        messages=(ChatMessage(role="user", content="\n".join([*lines, question])),),
        sampling=_greedy(),
    )


def sampled_question() -> DemoPrompt:
    """Return a sampled request: the seed repeats it."""
    sampling = SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.8, top_p=0.95, seed=7)
    question = "Tell me a story about a robot."
    return _prompt("sampled", "temperature 0.8, top-p 0.95, seed 7", question, sampling=sampling)


def structured_question() -> DemoPrompt:
    """Return a request whose answer follows a JSON schema."""
    sizes = {"enum": ["small", "medium", "large"]}
    fields = {"name": {"type": "string", "maxLength": 20}, "legs": {"type": "integer", "maximum": 8}, "size": sizes}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    sampling = SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.0, structured_outputs={"json": schema})
    return _prompt("structured", "the answer follows a JSON schema", "Describe an animal in JSON.", sampling=sampling)


def copying_question() -> DemoPrompt:
    """Return a request whose answer repeats its prompt: with speculation, a step brings several of its tokens."""
    task = "Repeat the following text, and correct spelling mistakes:"
    sampling = SamplingOptions(max_tokens=COPIED_TOKENS, temperature=0.0)
    why = "drafted from the prompt, several tokens a step"
    prompt = _prompt("copied text", why, f"{task}\n\n{_RULES}", sampling=sampling)
    return replace(prompt, shown=f"{task} [the rules of a library]")


def concurrent_pair() -> tuple[DemoPrompt, DemoPrompt]:
    """Return two requests to send at the same moment."""
    return (
        _prompt("concurrent A", "with B, in one batch", "Name three animals that live in the sea."),
        _prompt("concurrent B", "with A, in one batch", "Why does the moon shine?"),
    )


_SUBJECTS = ("gardening", "chemistry", "poetry", "bridges", "the sea", "cooking", "clocks", "birds", "music")


def _prompt(
    title: str, why: str, question: str, *, system: str | None = None, sampling: SamplingOptions | None = None
) -> DemoPrompt:
    head = (ChatMessage(role="system", content=system),) if system else ()
    return DemoPrompt(
        title=title,
        why=why,
        shown=question,
        messages=(*head, ChatMessage(role="user", content=question)),
        sampling=sampling or _greedy(),
    )


def _greedy() -> SamplingOptions:
    return SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.0)
