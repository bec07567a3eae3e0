"""Reads a SequenceSpec and checks everything that could corrupt the worker, although only routers send it.

Block hashes are not sent: a worker computes them from the root and the tokens. What it caches under a hash is therefore
what the hash names, and no caller can make it publish one prompt's KV under another's name.
"""

import math

from common.block_hash import ROOT_BYTES, hash_blocks
from common.errors import InvalidRequest, PromptTooLong
from common.ids import HashRoot, RequestId
from common.sampling import MAX_N
from common.wire import sampling_from_proto, unpack_tokens
from engine.executor import Executor
from engine.sequence import EngineRequest, Retention
from kvrelay.v1 import sequence_pb2


def engine_request(spec: sequence_pb2.SequenceSpec, executor: Executor) -> EngineRequest:
    """Return the engine's record. Raises InvalidRequest naming the field, and PromptTooLong before any hashing."""
    vocab_size, block_size = executor.vocab_size, executor.kv.shape.block_size
    prompt = unpack_tokens(spec.prompt_tokens, vocab_size=vocab_size, field="sequence.prompt_tokens")
    output = unpack_tokens(spec.output_tokens, vocab_size=vocab_size, field="sequence.output_tokens")
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="sequence.prompt_tokens")
    num_known, max_model_len = len(prompt) + len(output), executor.max_model_len
    if num_known >= max_model_len:
        raise PromptTooLong(f"prompt has {num_known} tokens; this model takes {max_model_len - 1}", field="prompt")
    sampling = sampling_from_proto(spec.sampling, default_max_tokens=1, default_seed=0)
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
        retention=Retention.BRIEF if spec.retention == sequence_pb2.RETENTION_BRIEF else Retention.KEEP,
    )
