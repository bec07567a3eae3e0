"""Reads a SequenceSpec and checks everything that could corrupt the worker, although only routers send it.

Block hashes are not sent: a worker computes them from the root and the tokens. What it caches under a hash is therefore
what the hash names, and no caller can make it publish one prompt's KV under another's name.
"""

import math

from common.block_hash import ROOT_BYTES, hash_blocks
from common.chat.parsing import AnswerFormatLike, has_markup, is_known
from common.errors import InvalidRequest, PromptTooLong
from common.ids import HashRoot, RequestId
from common.pooling import Pooling, pooling_from_proto
from common.sampling import MAX_N, SamplingParams
from common.tokens import TokenArray, num_packed
from common.wire import MAX_CACHE_MARKS, MAX_CACHE_TTL_S, sampling_from_proto, unpack_tokens
from engine.beams import BeamSnapshot, Hypothesis, LiveBeam
from engine.cache_marks import CacheMark, CacheMarks
from engine.interface import ServedModel
from engine.request import EngineRequest, Retention
from engine.text.grammar import Grammar
from kvrelay.v1 import sequence_pb2


def engine_request(
    spec: sequence_pb2.SequenceSpec, executor: ServedModel, grammar: Grammar | None = None
) -> EngineRequest:
    """Return the engine's record. Raises InvalidRequest naming the field, and PromptTooLong before any hashing.

    `grammar`: what the request's `structured_outputs` compile to.
    """
    vocab_size, block_size = executor.vocab_size, executor.kv.shape.block_size
    prompt = unpack_tokens(spec.prompt_tokens, vocab_size=vocab_size, field="sequence.prompt_tokens")
    output = unpack_tokens(spec.output_tokens, vocab_size=vocab_size, field="sequence.output_tokens")
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="sequence.prompt_tokens")
    num_known, max_model_len = len(prompt) + len(output), executor.max_model_len
    if num_known >= max_model_len:
        raise PromptTooLong(f"prompt has {num_known} tokens; this model takes {max_model_len - 1}", field="prompt")
    sampling = sampling_from_proto(spec.sampling, default_seed=0)
    sampling.validate(vocab_size=vocab_size)
    if spec.first_sample_index + sampling.n > MAX_N:
        first = spec.first_sample_index
        raise InvalidRequest(f"{sampling.n} from {first} on; at most {MAX_N}", field="sequence.first_sample_index")
    if output and sampling.n != 1:
        raise InvalidRequest("cannot continue several samples; send one request each", field="sequence.output_tokens")
    if len(output) >= sampling.max_tokens:
        raise InvalidRequest("has max_tokens already; nothing is left to generate", field="sequence.output_tokens")
    if len(spec.hash_root) != ROOT_BYTES:
        raise InvalidRequest(f"has {len(spec.hash_root)} bytes, not {ROOT_BYTES}", field="sequence.hash_root")
    if spec.HasField("tpot_slo_s") and not spec.tpot_slo_s > 0:
        raise InvalidRequest(f"is {spec.tpot_slo_s}; must be positive", field="sequence.tpot_slo_s")
    pooling = _pooling(spec, executor)
    beams = _beams(spec.beams, sampling, vocab_size=vocab_size) if spec.HasField("beams") else None
    if beams is not None and len(prompt) + beams.num_tokens >= max_model_len:
        raise InvalidRequest("cannot continue the beams: they fill the context of the model", field="sequence.beams")
    root = HashRoot(spec.hash_root)
    return EngineRequest(
        request_id=RequestId(spec.request_id),
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling,
        hash_root=root,
        block_hashes=hash_blocks(prompt + output, root=root, block_size=block_size),
        first_sample_index=spec.first_sample_index,
        tpot_slo_s=spec.tpot_slo_s if spec.HasField("tpot_slo_s") else math.inf,
        grammar=grammar,
        pooling=pooling,
        beams=beams,
        answer_format=_answer_format(spec),
        cache_marks=_cache_marks(spec, executor),
        retention=Retention.BRIEF if spec.retention == sequence_pb2.RETENTION_BRIEF else Retention.KEEP,
    )


def _cache_marks(spec: sequence_pb2.SequenceSpec, executor: ServedModel) -> CacheMarks | None:
    """Return what stays cached of the prompt; None where the tenant may pin nothing. Raises InvalidRequest."""
    if not spec.HasField("cache_pins"):
        return None
    given, shape, before = spec.cache_pins, executor.kv.shape, 0
    if len(given.pins) > MAX_CACHE_MARKS:
        raise InvalidRequest(f"has {len(given.pins)} marks; at most {MAX_CACHE_MARKS}", field="sequence.cache_pins")
    for pin in given.pins:
        if not (0 < pin.ttl_s <= MAX_CACHE_TTL_S and before < pin.num_tokens <= num_packed(spec.prompt_tokens)):
            raise InvalidRequest("a mark has no time, or no place of its own", field="sequence.cache_pins.pins")
        before = pin.num_tokens
    marks = (CacheMark(num_blocks=pin.num_tokens // shape.block_size, ttl_s=pin.ttl_s) for pin in given.pins)
    return CacheMarks(tenant=given.tenant, max_blocks=given.max_bytes // shape.block_bytes, marks=tuple(marks))


def _answer_format(spec: sequence_pb2.SequenceSpec) -> AnswerFormatLike | None:
    """Return the markup within which stop strings are not looked for. Raises InvalidRequest."""
    if not has_markup(spec.answer_format):
        return None
    if not is_known(spec.answer_format):
        raise InvalidRequest("names a markup that this worker does not know", field="sequence.answer_format")
    return spec.answer_format


def _pooling(spec: sequence_pb2.SequenceSpec, executor: ServedModel) -> Pooling | None:
    """Return how an embedding is made; None for a request that generates. Raises InvalidRequest."""
    field = "sequence.pooling"
    pooling = pooling_from_proto(spec.pooling, field=field)
    if pooling is not None and not executor.hidden_size:
        raise InvalidRequest(f"cannot embed with model {executor.model_name}: it gives no hidden states", field=field)
    if pooling is not None and spec.output_tokens:
        raise InvalidRequest("an embedding has no output tokens", field="sequence.output_tokens")
    return pooling


def _beams(state: sequence_pb2.BeamState, sampling: SamplingParams, *, vocab_size: int) -> BeamSnapshot:
    """Return the search that the request continues. Raises InvalidRequest."""
    field = "sequence.beams"
    if not sampling.has_beams:
        raise InvalidRequest("are for beam search; sampling asks for none", field=field)
    if not 1 <= len(state.live) <= sampling.n or len(state.complete) > sampling.n:
        raise InvalidRequest(
            f"{len(state.live)} live and {len(state.complete)} complete beams; sampling.n is {sampling.n}", field=field
        )
    if not all(math.isfinite(beam.score) for beam in (*state.live, *state.complete)):
        raise InvalidRequest("every score must be finite", field=f"{field}.score")

    def read(beam: sequence_pb2.Beam, most: int) -> TokenArray:
        token_ids = unpack_tokens(beam.tokens, vocab_size=vocab_size, field=f"{field}.tokens")
        if not 1 <= len(token_ids) <= most:
            raise InvalidRequest(
                f"a beam has {len(token_ids)} tokens; allowed are 1 to {most}", field=f"{field}.tokens"
            )
        return token_ids

    live = tuple(LiveBeam(token_ids=read(beam, sampling.max_tokens - 1), logprob=beam.score) for beam in state.live)
    if len({len(beam.token_ids) for beam in live}) != 1:
        raise InvalidRequest("live beams must be equally long", field=f"{field}.live")
    complete = tuple(
        Hypothesis(token_ids=read(beam, sampling.max_tokens), score=beam.score, has_end=beam.has_end)
        for beam in state.complete
    )
    return BeamSnapshot(live=live, complete=complete)
