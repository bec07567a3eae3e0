"""vLLM's AsyncLLM as `VllmEngine` uses it: samples go in with our sampling, and come out as our records."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from common.sampling import SamplingParams
from common.tokens import TokenArray
from engine.executor import Logprobs
from engine.vllm.errands import Errand

_PROMPT_PART = 1024
"""Places of a prompt whose log-probabilities are converted in one turn of the event loop: some 5 ms of 20 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """One sample of a request, as it enters vLLM."""

    errand: Errand
    token_ids: TokenArray
    """Prompt, and the tokens of the answer so far."""
    num_prompt_tokens: int
    sample_index: int
    salt: str
    """Cache salt: only requests with the same one share blocks."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    wants_prompt_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """New tokens of a sample."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]
    """One entry per token."""
    prompt_logprobs: tuple[Logprobs, ...]
    end: str
    """vLLM's reason for the end of the sample; empty while it goes on."""


class NotEntered(Exception):
    """vLLM has not taken a sample, and will not confirm its end."""


class VllmClient(Protocol):
    """One vLLM."""

    @property
    def is_broken(self) -> bool:
        """Whether vLLM is over: it answers no more."""
        ...

    def generate(self, spec: SampleSpec) -> AsyncIterator[SampleOutput]:
        """Yield a sample's tokens as they come. Cancelled, it ends the sample in vLLM. Raises NotEntered."""
        ...

    def shutdown(self) -> None:
        """End vLLM's processes. Takes seconds."""
        ...


class AsyncLlmClient:
    """See the module. `generate` on the event loop."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def is_broken(self) -> bool:
        """See `VllmClient`."""
        return bool(self._llm.errored)

    async def generate(self, spec: SampleSpec) -> AsyncIterator[SampleOutput]:
        """See `VllmClient`. Raises vLLM's other exceptions, too."""
        prompt = {"prompt_token_ids": spec.token_ids.tolist(), "cache_salt": spec.salt}
        # Were this cancelled before vLLM answers, the request could not be ended in vLLM.
        adding = asyncio.ensure_future(self._llm.add_request(str(spec.errand.key), prompt, _params(spec)))
        is_over = False
        try:
            outputs = await asyncio.shield(adding)
            while not is_over:
                output = outputs.get_nowait() or await outputs.get()
                is_over = output.finished
                for part in _prompt_parts(output.prompt_logprobs):
                    yield part
                    await asyncio.sleep(0)
                yield _output(output)
        finally:
            if not is_over:
                try:
                    added = await adding
                except Exception as error:
                    raise NotEntered(f"{type(error).__name__}: {error}") from error
                await self._llm.abort(added.request_id, internal=True)

    def shutdown(self) -> None:
        """See `VllmClient`."""
        self._llm.shutdown()


def _params(spec: SampleSpec) -> Any:
    """Return vLLM's sampling parameters: it compares tokens with the stops, and all else is our sampler's."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    from engine.vllm.sampling import sampling_extra

    return VllmSampling(
        temperature=0.0,
        max_tokens=spec.max_new_tokens,
        stop_token_ids=sorted(spec.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=spec.sampling.num_logprobs,
        prompt_logprobs=spec.sampling.num_prompt_logprobs if spec.wants_prompt_logprobs else None,
        flat_logprobs=True,  # else vLLM makes an object for each of them on the event loop
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": spec.errand.to_params()} | sampling_extra(spec),
    )


def _prompt_parts(logprobs: Any) -> Iterator[SampleOutput]:
    """Yield the log-probabilities of a prompt, of whose first token vLLM has none, in parts."""
    for begin in range(1, len(logprobs or ()), _PROMPT_PART):
        part = _logprobs(logprobs, range(begin, min(begin + _PROMPT_PART, len(logprobs))))
        yield SampleOutput(token_ids=(), logprobs=(), prompt_logprobs=part, end="")


def _output(output: Any) -> SampleOutput:
    [completion] = output.outputs
    num_tokens = len(completion.token_ids)
    return SampleOutput(
        token_ids=tuple(completion.token_ids),
        logprobs=_logprobs(completion.logprobs, range(num_tokens)) if completion.logprobs else (None,) * num_tokens,
        prompt_logprobs=(),
        end=completion.finish_reason or "" if output.finished else "",
    )


def _logprobs(logprobs: Any, places: range) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of places, of which vLLM gives the chosen token first, and then the best ones."""
    found: list[Logprobs] = []
    for place in places:
        each = slice(logprobs.start_indices[place], logprobs.end_indices[place])
        [(token_id, logprob), *top] = zip(logprobs.token_ids[each], logprobs.logprobs[each], strict=True)
        found.append(Logprobs(token_id=token_id, logprob=logprob, top=tuple(top)))
    return tuple(found)
