"""Records between a worker and the processes of its vLLM: errands go down with a request, reports come up a pipe.

A request's errand is its `kv_transfer_params`, which vLLM passes to its KV connector (`engine.vllm.staging_plugin`).
Reports are msgpack values; each process has a pipe of its own, so that none is cut by another's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from common.timing import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Work of the connector for one request."""

    key: int
    """Name of the request between worker and connector; never used again."""
    region_path: str = ""
    """File of the slots."""
    slots: tuple[int, ...] = ()
    """Staged blocks of its prompt, in order (`engine.vllm.staging`)."""
    num_loaded: int = 0
    """Leading tokens whose KV is in the slots."""
    num_presumed: int = 0
    """Leading tokens among them whose slots are empty: nothing is loaded unless vLLM has them in its cache."""
    stores: bool = False
    """Whether the KV of its prompt is to be put into the slots, as it is computed."""
    exports: tuple[bytes, ...] = ()
    """vLLM's names of cached blocks that are put into the slots at once. A request that has some is never scheduled."""

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the request."""
        return _fields(self)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Errand":
        """Invert `to_params`."""
        return cls(**{**params, "slots": tuple(params["slots"]), "exports": tuple(params["exports"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Blocks of one request that a rank copies between pages and slots."""

    key: int
    block_ids: tuple[int, ...]
    """vLLM's pages; none for a load whose blocks all are in vLLM's cache."""
    slots: tuple[int, ...]
    num_tokens: int
    """Leading tokens of the request whose KV is in its slots, once this copy is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrands:
    """Work of the ranks with one step."""

    region_path: str
    loads: tuple[Copy, ...]
    """Slots to pages, before the step."""
    stores: tuple[Copy, ...]
    """Pages to slots, behind it."""
    closed: tuple[int, ...]
    """Requests that are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """A rank's pages, as it reports them once when they are there."""

    rank: int
    backend: str
    """Attention backend, and the order of the elements in a page where it is not the backend's name that says it."""
    num_layers: int
    page_shape: tuple[int, ...]
    """Shape of a page of all ranks together."""
    dtype: str
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A process cannot hand over the pages of this model, and ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A rank has copied a request's KV into its slots, or out of them, so far."""

    rank: int
    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A rank touches the slots of these requests no more."""

    rank: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Consecutive blocks that entered vLLM's prefix cache."""

    hashes: tuple[bytes, ...]
    """vLLM's names of the blocks."""
    parent: bytes | None
    """vLLM's name of the block before them; None at the beginning of a prompt."""
    salt: str
    """Cache salt of the prompt, at its beginning."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """vLLM's scheduler has planned a step."""

    shape: StepShape
    started: tuple[tuple[int, int], ...]
    """(key, cached tokens) of the requests that it starts."""
    computed: tuple[tuple[int, int], ...]
    """(key, tokens computed once it ends) of the requests whose prompts it computes."""
    changes: tuple[BlocksStored | bytes, ...]
    """Changes of the prefix cache in order; bytes are vLLM's name of a block that has left."""
    is_cleared: bool
    """Whether the prefix cache was emptied before these changes."""
    preempted: tuple[int, ...]
    """Keys of the requests that vLLM has taken the pages of; they wait in its scheduler, before all others."""
    num_free_pages: int
    """Pages that no request of vLLM has, behind those of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """Results of the oldest planned step have come."""

    seconds: float


Report = PageReport | Refusal | Staged | Closed | StepBegun | StepEnded
_KINDS: tuple[type[Any], ...] = (PageReport, Refusal, Staged, Closed, StepBegun, StepEnded)


def encode_report(report: Report) -> bytes:
    """Return a report's bytes; `ReportReader` inverts it."""
    return bytes(msgpack.packb([_KINDS.index(type(report)), report], default=_fields, use_bin_type=True))


def _fields(record: Any) -> dict[str, Any]:
    """Return a record's fields as they are; `asdict` would copy each token in them."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


@dataclass(slots=True)
class ReportReader:
    """Puts the bytes of one pipe together to reports."""

    _unpacker: Any = field(default_factory=lambda: msgpack.Unpacker(use_list=False, strict_map_key=False))

    def feed(self, data: bytes) -> list[Report]:
        """Return the reports that are complete with these bytes."""
        self._unpacker.feed(data)
        return [_report(kind, fields) for kind, fields in self._unpacker]


def _report(kind: int, fields: dict[str, Any]) -> Report:
    if _KINDS[kind] is StepBegun:
        fields["shape"] = StepShape(**fields["shape"])
        fields["changes"] = tuple(
            BlocksStored(**each) if isinstance(each, dict) else each for each in fields["changes"]
        )
    report: Report = _KINDS[kind](**fields)
    return report
