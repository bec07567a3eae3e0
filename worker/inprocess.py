"""The engine alone, in the caller's process and thread: no pools, no network, no handoff.

For `kvrelay generate --in-process`, and as the baseline of benchmarks that measure what the split costs.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import tokenizers

from common.block_hash import hash_blocks, hash_root
from common.clock import SystemClock
from common.config import ServingConfig
from common.errors import InvalidRequest, Refused
from common.ids import mint_request_id
from common.sampling import SamplingParams
from common.tokens import as_tokens
from common.wire_names import FINISH_REASON_NAMES
from engine.core import EngineCore
from engine.events import EngineEvent, EngineLoad, Failed, Tokens
from engine.executor import Executor
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.text.grammar import Grammars
from worker.factory import limits_for, load_executor_for, speculator_for
from worker.output import OutputStreams

MAX_GRAMMARS = 64
"""Compiled grammars that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One generated token of one request."""

    request_idx: int
    sample_index: int
    token_index: int
    token_id: int
    text: str
    finish_reason: str | None
    """"stop", "length" or None while the sample goes on."""


class LocalEngine:
    """A loaded model that generates while it is iterated. Not thread-safe."""

    def __init__(self, executor: Executor, tokenizer: tokenizers.Tokenizer, config: ServingConfig) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        speculator = speculator_for(config, config.pools.decode, executor)
        self._core = EngineCore(executor, limits_for(config.pools.decode), SystemClock(), speculator)
        self._root = hash_root(model_fingerprint=executor.kv.shape.fingerprint)
        grammars = Grammars(tokenizer, vocab_size=executor.vocab_size, eos_token_ids=executor.eos_token_ids)
        self._grammar = lru_cache(MAX_GRAMMARS)(grammars.compile)

    @classmethod
    def load(cls, config: ServingConfig) -> "LocalEngine":
        """Load the model of `config.model`, with the decode pool's pages and limits. Takes seconds."""
        executor, tokenizer = load_executor_for(config, config.pools.decode)
        return cls(executor, tokenizer, config)

    def load_report(self) -> EngineLoad:
        """Return the load of the engine."""
        return self._core.load()

    def stream(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Iterator[SampleText]:
        """Generate one request. Raises InvalidRequest or PromptTooLong before the first token."""
        return self.stream_all([(prompt_token_ids, sampling)])

    def stream_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> Iterator[SampleText]:
        """Generate several requests in one batch; closing the iterator frees their pages."""
        running: list[tuple[Group, OutputStreams]] = []
        inbox: deque[tuple[int, EngineEvent]] = deque()
        try:
            for idx, (prompt, sampling) in enumerate(requests):
                request = self._request(prompt, sampling)
                group = self._core.add(request, partial(_note, inbox, idx))
                if isinstance(group, Refused):
                    raise group.error()
                running.append((group, OutputStreams(request, self.tokenizer)))
            while any(not streams.is_over for _group, streams in running):
                for group, event in self._core.step():
                    group.sink(event)
                while inbox:
                    idx, event = inbox.popleft()
                    yield from self._texts(idx, *running[idx], event)
        finally:
            for group, _streams in running:
                self._core.cancel(group)
            self._core.wake()
            while any(sequence.num_in_flight for group, _streams in running for sequence in group.sequences):
                for group, event in self._core.step():
                    group.sink(event)  # the last step that writes their pages frees them

    def _texts(self, idx: int, group: Group, streams: OutputStreams, event: EngineEvent) -> Iterator[SampleText]:
        if isinstance(event, Failed):
            raise event.error
        if not isinstance(event, Tokens):
            return
        messages, stopped = streams.take(event.tokens)
        for sample_index in stopped:
            self._core.finish_sample(group, sample_index)
        for message in messages:
            yield SampleText(
                request_idx=idx,
                sample_index=message.sample_index,
                token_index=message.token_index,
                token_id=message.token_id,
                text=message.text,
                finish_reason=FINISH_REASON_NAMES.get(message.finish_reason),
            )

    def _request(self, prompt: Sequence[int], sampling: SamplingParams) -> EngineRequest:
        sampling.validate(vocab_size=self.executor.vocab_size)
        if not prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        block_size = self.executor.kv.shape.block_size
        room = min(self.executor.max_model_len, self.executor.kv.num_blocks * block_size) - len(prompt)
        sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))
        return EngineRequest(
            request_id=mint_request_id(),
            prompt_token_ids=as_tokens(prompt),
            sampling=sampling,
            grammar=self._grammar(sampling.structured_outputs) if sampling.structured_outputs else None,
            hash_root=self._root,
            block_hashes=hash_blocks(prompt, root=self._root, block_size=block_size),
        )


def _note(inbox: "deque[tuple[int, EngineEvent]]", idx: int, event: EngineEvent) -> None:
    inbox.append((idx, event))
