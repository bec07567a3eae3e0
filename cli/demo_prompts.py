"""Questions of the demo, and the reason for each."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.client import ChatMessage, SamplingOptions

ANSWER_TOKENS = 48
LONG_PROMPT_TOKENS = 1000
_TEMPLATE_TOKENS = 64  # more than any chat template adds around two messages

_LIBRARY = (
    "You are the assistant of a town library. These are its rules. The library opens at nine in the morning and closes"
    " at eight in the evening from Monday to Friday. On Saturday it opens at ten and closes at four in the afternoon."
    " On Sunday it is closed. A reader may borrow up to twelve books for four weeks. A loan can be renewed twice unless"
    " another reader has asked for the book. Films and music may be borrowed for one week. A late book costs twenty"
    " cents a day, but never more than five euros. Children under twelve never pay. The reading room on the second"
    " floor is silent; the café on the ground floor is not. Computers can be used for one hour a day without a card."
    " Answer in one short sentence."
)


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
    return _ask("plain question", "greedy, nothing cached yet", "What is the capital of France?")


def shared_prefix_pair() -> tuple[DemoPrompt, DemoPrompt]:
    """Return two questions behind one long system message: the second finds its KV."""
    return (
        _ask("shared prefix 1", "a long system message", "When does it close on Saturday?", system=_LIBRARY),
        _ask("shared prefix 2", "the same system message: cached", "How many books may I borrow?", system=_LIBRARY),
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
    return _ask("sampled", "temperature 0.8, top-p 0.95, seed 7", "Tell me a story about a robot.", sampling=sampling)


def concurrent_pair() -> tuple[DemoPrompt, DemoPrompt]:
    """Return two requests to send at the same moment."""
    return (
        _ask("concurrent A", "with B, in one batch", "Name three animals that live in the sea."),
        _ask("concurrent B", "with A, in one batch", "Why does the moon shine?"),
    )


_SUBJECTS = ("gardening", "chemistry", "poetry", "bridges", "the sea", "cooking", "clocks", "birds", "music")


def _ask(
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
