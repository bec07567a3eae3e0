"""Our sampler inside vLLM: a logits processor that chooses the token, and leaves vLLM nothing else to choose.

So a token of a sample is the same function of logits, seed and position as in every other engine,
and an answer that goes on elsewhere continues its noise, its penalties and its grammar: all are derived from the
tokens so far. To vLLM every request is greedy.

Written against the interface of vLLM's V1 model runner.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from common.sampling import SamplingParams
from common.text_files import load_tokenizer
from common.tokens import TokenArray, as_tokens
from common.wire import sampling_from_proto, sampling_to_proto
from engine.model.checkpoints.checkpoint import read_config
from engine.model.loader import weight_files
from engine.ops.select import load_draw_kernel
from engine.options import eos_token_ids
from engine.sampling.logits import SamplingRow
from engine.sampling.sampler import Sampler
from engine.text.grammar import Grammar, Grammars, GrammarState
from engine.vllm.client import SampleSpec
from kvrelay.v1 import sampling_pb2

PROCESSOR = f"{__name__}:SamplerPlugin"
"""Name of the processor for vLLM's `logits_processors`."""
_KEY = "kvrelay_sampling"
_MAX_GRAMMARS = 16
"""Compiled grammars that are kept: the samples of a request come one by one, and again when they were preempted."""


def sampling_extra(spec: SampleSpec) -> dict[str, Any]:
    """Return the `extra_args` of a sample's vLLM request for `SamplerPlugin`."""
    packed = sampling_to_proto(replace(spec.sampling, num_logprobs=None)).SerializeToString().hex()
    return {
        _KEY: {
            "params": packed,
            "sample_index": spec.sample_index,
            "num_prompt_tokens": spec.num_prompt_tokens,
            "salt": spec.salt,
        }
    }


@dataclass(slots=True, eq=False)
class _Sample:
    """One vLLM request."""

    params: SamplingParams
    sample_index: int
    prompt: TokenArray
    output: TokenArray
    """Tokens of the answer, those before this request included."""
    num_before: int
    """Tokens of the answer before this request."""
    answer: Seq[int]
    """Tokens of the answer behind them, in vLLM's own list, which grows."""
    grammar: GrammarState | None

    def row(self) -> SamplingRow | None:
        """Return the row of the next token; None where vLLM chooses the same one by itself."""
        self.output.extend(self.answer[len(self.output) - self.num_before :])
        row = SamplingRow(
            params=self.params,
            sample_index=self.sample_index,
            token_index=len(self.output),
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
            owner=self,
            allowed=None if self.grammar is None else self.grammar.allowed(self.output),
        )
        return None if self.params.temperature == 0 and row.has_plain_logits else row


class SamplerPlugin(LogitsProcessor):  # type: ignore[misc]  # there are no types without vLLM
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: FBT001 - as vLLM calls it
        model = vllm_config.model_config
        folder = Path(model.model)
        self._eos_token_ids = eos_token_ids(folder, read_config(folder, weight_files(folder)))
        self._vocab_size = model.get_vocab_size()
        self._folder = folder
        self._sampler = Sampler(
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            draw_kernel=load_draw_kernel(device),
        )
        self._samples: dict[int, _Sample] = {}
        self._grammars: Grammars | None = None
        # By salt, too: the time of an answer tells none what another tenant has asked for.
        self._compiled = lru_cache(_MAX_GRAMMARS)(lambda _salt, structure: self._compile(structure))

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        process_dict_updates(self._samples, batch_update, self._sample)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`. Makes each chosen token the best one."""
        rows = {place: row for place, sample in self._samples.items() if (row := sample.row()) is not None}
        if rows:
            places = torch.tensor(list(rows), device=logits.device)
            chosen = self._sampler.sample(logits[places], list(rows.values()))
            logits[places, torch.tensor([each.token_id for each in chosen], device=logits.device)] = torch.inf
        return logits

    def _sample(self, params: Any, prompt: list[int] | None, answer: list[int]) -> _Sample | None:
        extra = (params.extra_args or {}).get(_KEY)
        if extra is None or prompt is None:
            return None
        message = sampling_pb2.SamplingParams.FromString(bytes.fromhex(extra["params"]))
        sampling = sampling_from_proto(message, default_seed=0)
        num_prompt_tokens: int = extra["num_prompt_tokens"]
        grammar = self._compiled(extra["salt"], sampling.structured_outputs) if sampling.structured_outputs else None
        return _Sample(
            params=sampling,
            sample_index=extra["sample_index"],
            prompt=as_tokens(prompt[:num_prompt_tokens]),
            output=array("I", prompt[num_prompt_tokens:]),
            num_before=len(prompt) - num_prompt_tokens,
            answer=answer,
            grammar=grammar.begin() if grammar is not None else None,
        )

    def _compile(self, structure: str) -> Grammar:
        if self._grammars is None:
            tokenizer: tokenizers.Tokenizer = load_tokenizer(self._folder)
            self._grammars = Grammars(tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
        return self._grammars.compile(structure)
