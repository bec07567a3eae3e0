"""Facts that workers report about themselves, and the check that they fit together.

KV blocks are exchanged and hashes are compared only between processes that agree on weights, layout and hash code. A
worker that disagrees is not used, and its state says why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.block_hash import hash_probe, hash_root
from common.errors import UnknownModel
from common.ids import Epoch, HashRoot, WorkerId
from common.parity import NO_PROBES, TextProbes, find_text_mismatch
from common.wire_names import ROLE_NAMES
from engine.window import BlockWindow, Window
from kvrelay.v1 import worker_pb2
from router.placement.answer_pool import AnswerPool

MAX_BLOCK_SIZE = 4096
"""Largest block size that is accepted: larger than any KV page, and hashed in a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """A worker as the controller names it."""

    worker_id: WorkerId
    role: "worker_pb2.WorkerRole.ValueType"
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One life of a worker process."""

    worker_id: WorkerId
    epoch: Epoch
    role: "worker_pb2.WorkerRole.ValueType"
    model_name: str
    fingerprint: str
    """Fingerprint of weights and KV layout."""
    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    hash_probe: bytes
    text_probes: TextProbes = NO_PROBES
    """Results of its tokenizer and chat template for fixed texts."""
    block_bytes: int = 0
    """KV bytes of one block."""
    kv_port: int = 0
    """Port on its host where other workers pull from it."""
    direct_port: int = 0
    """Port on its host where clients stream their tokens."""
    hidden_size: int = 0
    """Length of the embeddings that it computes; 0: it computes none."""
    exact_resume: bool = True
    """Whether it continues another worker's answer exactly as that worker would have, also at near ties."""
    window: BlockWindow | None = None
    """Window whose pages it takes to go on behind cached blocks; None: it has no such pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The served model, known from workers, but for its further names."""

    name: str
    aliases: tuple[str, ...] = ()
    """Further names that requests may give."""
    configured_id: str = ""
    """`model.id`, which requests may give, too. It is told to no client, since it may be a path."""
    fingerprint: str
    block_size: int
    vocab_size: int
    context_length: int
    """Smallest context length of all workers."""
    max_decode_blocks: int
    """Pages of the largest decode worker; 0 before the first one."""
    root: HashRoot
    """First link of the block hashes; keyed for each request (`keyed`)."""
    block_bytes: int = 0
    """KV bytes of one block."""
    max_prefill_blocks: int = 0
    """Pages of the largest prefill worker; 0 before the first one."""
    hidden_size: int = 0
    """Length of an embedding; 0 when not every prefill worker computes them."""
    exact_resume: bool = True
    """Whether every worker continues another one's answer exactly as that one would have, also at near ties."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients are told, each once."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def check_name(self, name: str) -> None:
        """Raise UnknownModel when a request names another model."""
        if name and name not in (*self.names, self.configured_id):
            known = ", ".join(map(repr, self.names))
            raise UnknownModel(f"model {name[:80]!r} is not served; {known} is", field="model")

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer: what the model takes and the largest decode worker holds."""
        held = self.max_decode_blocks * self.block_size
        return min(self.context_length, held) if held else self.context_length

    @property
    def shortage(self) -> str:
        """Why requests may not be as long as the model could take, in words; empty: they may."""
        if self.max_model_len == self.context_length:
            return ""
        return (
            f"prompt and answer may have {self.max_model_len} tokens, not {self.context_length}: the largest decode"
            " worker has pages for no more; give pools.decode more kv_memory_gib (or num_blocks), or set"
            " model.max_model_len"
        )

    def has_known(self, pool: AnswerPool) -> bool:
        """Whether a worker of a pool has been known."""
        return (self.max_prefill_blocks if pool is AnswerPool.PREFILL else self.max_decode_blocks) > 0

    def with_pools_of(self, before: "ModelFacts | None") -> "ModelFacts":
        """Return the facts; those of a pool without workers now are as they were before, for the same model."""
        if before is None or before.fingerprint != self.fingerprint:
            return self
        facts = self
        if not facts.max_decode_blocks:
            facts = replace(facts, max_decode_blocks=before.max_decode_blocks)
        if not facts.max_prefill_blocks:
            facts = replace(facts, max_prefill_blocks=before.max_prefill_blocks, hidden_size=before.hidden_size)
        return facts

    def keyed(self, block_key: bytes, *, cache_salt: str) -> "ModelFacts":
        """Return the facts for one tenant, with hashes keyed by the cluster's block key and the tenant's salt."""
        root = hash_root(model_fingerprint=self.fingerprint, cache_salt=cache_salt, key=block_key)
        return replace(self, root=root)


def facts_from_proto(described: worker_pb2.DescribeWorkerResponse) -> WorkerFacts:
    """Return the facts of a description."""
    return WorkerFacts(
        worker_id=WorkerId(described.worker_id),
        epoch=Epoch(described.epoch),
        role=described.role,
        model_name=described.model_name,
        fingerprint=described.layout.fingerprint,
        block_size=described.layout.block_size,
        num_blocks=described.num_blocks,
        vocab_size=described.vocab_size,
        max_model_len=described.max_model_len,
        hash_probe=described.hash_probe,
        text_probes=TextProbes(tokenizer=described.tokenizer_probe, template=described.template_probe),
        block_bytes=described.layout.block_bytes,
        kv_port=described.kv_port,
        direct_port=described.direct_port,
        hidden_size=described.hidden_size,
        exact_resume=described.exact_resume,
        window=_window_of(described),
    )


def _window_of(described: worker_pb2.DescribeWorkerResponse) -> BlockWindow | None:
    if not described.window_tokens:
        return None
    window = Window(num_tokens=described.window_tokens, is_chunk=described.window_is_chunk)
    return BlockWindow(window=window, block_size=described.layout.block_size)


def check_report(report: worker_pb2.LoadReport) -> None:
    """Raise ValueError for a load that cannot be used: not finite, or negative."""
    if not (math.isfinite(report.prefill_backlog_s) and report.prefill_backlog_s >= 0):
        raise ValueError(f"load.prefill_backlog_s is {report.prefill_backlog_s}")


def find_mismatch(
    facts: WorkerFacts, *, endpoint: WorkerEndpoint, reference: WorkerFacts | None, probes: TextProbes | None
) -> str | None:
    """Return why the worker cannot be used, or None.

    `reference` is any worker in use; `probes` are the router's own results for the fixed texts, None to skip the check.
    """
    if facts.worker_id != endpoint.worker_id:
        return f"{endpoint.address} is worker {facts.worker_id!r}, not {endpoint.worker_id!r}"
    if facts.role != endpoint.role:
        return f"role is {_role_name(facts)}, wanted {_role_name(endpoint)}"
    if min(facts.block_size, facts.num_blocks, facts.vocab_size, facts.max_model_len) < 1:
        return "block_size, num_blocks, vocab_size and max_model_len must be positive"
    if facts.block_size > MAX_BLOCK_SIZE:
        return f"block_size is {facts.block_size}; at most {MAX_BLOCK_SIZE} is accepted"
    if facts.hash_probe != hash_probe(hash_root(model_fingerprint=facts.fingerprint), facts.block_size):
        return "hash_probe differs: worker and router hash blocks differently; start both from one version of kvrelay"
    if probes is not None and (why := find_text_mismatch(facts.text_probes, probes)) is not None:
        return why
    if reference is None:
        return None
    for name in ("block_size", "block_bytes", "fingerprint", "vocab_size", "model_name"):
        mine, theirs = getattr(facts, name), getattr(reference, name)
        if mine != theirs:
            return f"{name} is {mine!r}, but worker {reference.worker_id} has {theirs!r}"
    return None


def summarize(workers: Sequence[WorkerFacts], *, aliases: tuple[str, ...] = (), configured_id: str = "") -> ModelFacts:
    """Return the model that these matching workers, at least one, serve, with its further names."""
    first = workers[0]
    decode = [facts for facts in workers if facts.role == worker_pb2.WORKER_ROLE_DECODE]
    prefill = [facts for facts in workers if facts.role == worker_pb2.WORKER_ROLE_PREFILL]
    return ModelFacts(
        name=first.model_name,
        aliases=aliases,
        configured_id=configured_id,
        fingerprint=first.fingerprint,
        block_size=first.block_size,
        vocab_size=first.vocab_size,
        context_length=min(facts.max_model_len for facts in workers),
        max_decode_blocks=max((facts.num_blocks for facts in decode), default=0),
        root=hash_root(model_fingerprint=first.fingerprint),
        block_bytes=first.block_bytes,
        max_prefill_blocks=max((facts.num_blocks for facts in prefill), default=0),
        hidden_size=min((facts.hidden_size for facts in prefill), default=0),
        exact_resume=all(facts.exact_resume for facts in workers),
    )


def _role_name(named: WorkerEndpoint | WorkerFacts) -> str:
    return ROLE_NAMES.get(named.role, f"unknown ({int(named.role)})")
