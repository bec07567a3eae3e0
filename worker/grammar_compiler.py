"""Compiles the grammars of structured answers, off a worker's event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import tokenizers

from common.wire import unpack_tokens
from engine.executor import Executor
from engine.grammar import Grammar, Grammars
from engine.grammar_trial import GrammarTrial

_NUM_THREADS = 4
"""Threads apart from those that move KV, which a flood of grammars would hold up."""


class GrammarCompiler:
    """The grammars of one worker. Event loop only; threads and the process for trials begin when they are needed."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, executor: Executor) -> None:
        self._vocab_size = executor.vocab_size
        self._grammars = Grammars(tokenizer, vocab_size=self._vocab_size, eos_token_ids=executor.eos_token_ids)
        self._trial = GrammarTrial(self._grammars)
        self._threads: ThreadPoolExecutor | None = None

    async def compile(self, structure: str, output: bytes) -> Grammar:
        """Return the grammar of a structure, which the packed tokens of an answer begun elsewhere follow.

        Raises InvalidRequest. New grammars are tried in another process first: hostile ones take long, or crash.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, structure, output)

    async def aclose(self) -> None:
        """End the threads and the process, if there are any."""
        if self._threads is not None:
            await asyncio.to_thread(self._threads.shutdown)
            await asyncio.to_thread(self._trial.close)

    def _compile(self, structure: str, output: bytes) -> Grammar:
        if not self._grammars.knows(structure):
            self._trial.pass_or_refuse(structure)
        grammar = self._grammars.compile(structure)
        grammar.check(unpack_tokens(output, vocab_size=self._vocab_size, field="sequence.output_tokens"))
        return grammar
