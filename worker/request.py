"""Reads a SequenceSpec. Routers are ours, but a worker checks what would corrupt it all the same."""

from common.block_hash import HASH_BYTES, ROOT_BYTES, BlockHashes
from common.errors import InvalidRequest
from common.ids import HashRoot, RequestId
from common.wire import sampling_from_proto, unpack_tokens
from engine.executor import Executor
from engine.sequence import EngineRequest, Retention
from kvrelay.v1 import sequence_pb2


def engine_request(spec: sequence_pb2.SequenceSpec, executor: Executor) -> EngineRequest:
    """Return the engine's record. Raises InvalidRequest naming the field."""
    vocab_size, block_size = executor.vocab_size, executor.kv.shape.block_size
    prompt = unpack_tokens(spec.prompt_tokens, vocab_size=vocab_size, field="sequence.prompt_tokens")
    output = unpack_tokens(spec.output_tokens, vocab_size=vocab_size, field="sequence.output_tokens")
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="sequence.prompt_tokens")
    sampling = sampling_from_proto(spec.sampling, default_max_tokens=1, default_seed=0)
    sampling.validate(vocab_size=vocab_size)
    if output and sampling.n != 1:
        raise InvalidRequest("only one sample at a time can be taken over", field="sequence.output_tokens")
    if len(output) >= sampling.max_tokens:
        raise InvalidRequest("there is nothing left to generate", field="sequence.output_tokens")
    num_blocks = (len(prompt) + len(output)) // block_size
    if len(spec.hash_root) != ROOT_BYTES:
        raise InvalidRequest(f"has {len(spec.hash_root)} bytes, not {ROOT_BYTES}", field="sequence.hash_root")
    if len(spec.block_hashes) != num_blocks * HASH_BYTES:
        raise InvalidRequest(
            f"{len(spec.block_hashes)} bytes of hashes for {num_blocks} full blocks", field="sequence.block_hashes"
        )
    return EngineRequest(
        request_id=RequestId(spec.request_id),
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling,
        hash_root=HashRoot(spec.hash_root),
        block_hashes=BlockHashes(spec.block_hashes),
        first_sample_index=spec.first_sample_index,
        retention=Retention.BRIEF if spec.retention == sequence_pb2.RETENTION_BRIEF else Retention.KEEP,
    )
