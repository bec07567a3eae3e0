"""`kvrelay chat`: a conversation in the terminal."""

import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from cli.console import err, write_text
from cli.errors import explain
from cli.options import ModelOption, Sampling, TemperatureOption, TopPOption, options_from_dataclasses
from cli.render import stats_lines
from cli.target import ConnectionOptions
from kvrelay.client import ChatMessage, Client, Generation, KvrelayError, SamplingOptions, Token

_HELP = "/reset forgets the conversation · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(Sampling):
    """Options for how an answer is sampled, with the defaults of a conversation."""

    temperature: TemperatureOption = 0.7
    top_p: TopPOption = 0.95


@options_from_dataclasses
def chat(
    system: Annotated[str | None, typer.Option("--system", help="System prompt.", show_default=False)] = None,
    model: ModelOption = None,
    show_stats: Annotated[
        bool, typer.Option("--show-stats", "-s", help="Show the cost of each answer, on stderr.")
    ] = False,
    *,
    connection: ConnectionOptions,
    sampling: ChatSampling,
) -> None:
    """Talk to the model.

    The conversation is kept, and its KV stays cached between the turns. /reset
    forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer but
    not the program.

    \b
    kvrelay chat
    kvrelay chat --system "Answer in one sentence." --temperature 0
    """  # noqa: D301 - \b marks a preformatted block
    with connection.client() as client:
        name = model or client.models()[0].name
        err.print(f"{name} at {client.address} · {_HELP}", soft_wrap=True)
        conversation = ChatSession(client, sampling.options(), model=model or "", system=system)
        _converse(conversation, after_answer=_print_stats if show_stats else _print_nothing)


class ChatSession:
    """The turns so far. A turn that got no answer at all is forgotten."""

    def __init__(self, client: Client, sampling: SamplingOptions, *, model: str, system: str | None) -> None:
        self._client = client
        self._sampling = sampling
        self._model = model
        self._system = [ChatMessage(role="system", content=system)] if system else []
        self._turns: list[ChatMessage] = []

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()

    def ask(self, question: str) -> Generation | None:
        """Stream the answer to stdout; None when Ctrl-C stopped it. Raises KvrelayError."""
        asked = ChatMessage(role="user", content=question)
        messages = [*self._system, *self._turns, asked]
        texts: list[str] = []
        generation: Generation | None = None
        with self._client.stream_chat(messages, model=self._model, **self._sampling) as stream:
            try:
                for event in stream:
                    if isinstance(event, Token):
                        texts.append(event.text)
                        write_text(event.text)
                generation = stream.result()
            except KeyboardInterrupt:
                write_text(" …")
        write_text("\n")
        if answer := "".join(texts):
            self._turns += [asked, ChatMessage(role="assistant", content=answer)]
        return generation


def _converse(conversation: ChatSession, *, after_answer: Callable[[Generation], None]) -> None:
    while (question := _read_question()) is not None:
        command = question.strip()
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation.reset()
            err.print("forgotten")
        elif command.startswith("/"):
            err.print(_HELP)
        elif command:
            try:
                generation = conversation.ask(question)
            except KvrelayError as error:  # the conversation goes on: the next turn may fit, the cluster recover
                err.print(explain(error), soft_wrap=True)
                continue
            if generation is not None:
                after_answer(generation)


def _read_question() -> str | None:
    """Return the next line; None at the end of input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and a history
    while True:
        try:
            return input("> ")
        except EOFError:
            err.print()
            return None
        except KeyboardInterrupt:
            err.print("\n/exit or Ctrl-D leaves")


def _print_stats(generation: Generation) -> None:
    for line in stats_lines(generation, elapsed_s=generation.timings.e2e_s):
        err.print(line, soft_wrap=True)


def _print_nothing(generation: Generation) -> None:
    """Do not print statistics."""
