"""The seam between a worker's services and its engine.

`engine.core.EngineCore` steps an executor itself; `engine.vllm.engine.VllmEngine` passes requests on to vLLM's own
engine. Both take a request in the same states, and answer with the same events.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import Protocol

from common.block_hash import BlockHashes, PrefixTokens
from common.errors import Refused
from common.ids import BlockHash, HashRoot
from common.kv_events import KvEvents
from common.prefix_chains import PrefixChain
from common.return_curve import ReturnCurve
from common.timing import TimingModel
from engine.events import EngineLoad
from engine.kv_store import KvStore
from engine.published import ForgottenPages
from engine.request import EngineRequest
from engine.steps.group import Group, Sink
from engine.steps.landing import Landing, Pinned
from engine.steps.scheduler import SchedulerLimits
from engine.work import StepFloors


class ServedModel(Protocol):
    """Facts about an engine's model, and the pages that travel."""

    @property
    def kv(self) -> KvStore:
        """Pages of which block tables speak."""
        ...

    @property
    def model_name(self) -> str:
        """Name under which clients ask for it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of an embedding; 0 when it cannot compute any."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def compiles_steps(self) -> bool:
        """See `Executor`."""
        ...

    @property
    def exact_resume(self) -> bool:
        """See `Executor`."""
        ...

    @property
    def floors(self) -> StepFloors | None:
        """See `Executor`."""
        ...


class PrefixPages(Protocol):
    """Cached blocks that travel between engines; see `engine.steps.landing.Landings`."""

    def unpin(self, pinned: Pinned) -> None:
        """Release the pages that `EngineDriver.pin` returned."""
        ...

    def reserve(self, landing: Landing) -> Refused | None:
        """Hold the wanted blocks that are cached, and grant pages for the others when there is room."""
        ...

    def reserve_below(self, landing: Landing, values: Seq[float], max_blocks: int) -> Refused | None:
        """Like `reserve`, but a page is granted only if it is empty or worth less than the value of the block."""
        ...

    def mark_reused(self, landing: Landing, num_blocks: int) -> int:
        """Mark the first `num_blocks` blocks as reused. Returns how many blocks are here."""
        ...

    def commit(self, landing: Landing, num_blocks: int, prefix: PrefixTokens | None = None) -> None:
        """Publish the first `num_blocks` blocks, whose content is verified. The source may have told their tokens."""
        ...

    def release(self, landing: Landing) -> None:
        """Release all pages."""
        ...


class Engine(Protocol):
    """One engine: requests in, events out. Methods take effect between two steps (`engine.thread.EngineDriver`)."""

    @property
    def landings(self) -> PrefixPages:
        """Cached blocks that travel."""
        ...

    def arrive(self, hashes: BlockHashes) -> Landing:
        """Return a place in line for a request that first pulls the blocks of these hashes; it enters with `add`."""
        ...

    def add(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """Put a request in line: prefill here, then decode, or embed it if it has `pooling`.

        Raises PromptTooLong, and InvalidRequest for what the engine cannot do.
        """
        ...

    def add_prefill_only(self, request: EngineRequest, sink: Sink, landing: Landing | None = None) -> Group | Refused:
        """Put a request in line for prompt and first tokens; its pages stay until `cancel`. Raises as `add`."""
        ...

    def reserve(self, request: EngineRequest, sink: Sink) -> Group | Refused:
        """Grant pages for a request whose KV will be pulled. Raises as `add`."""
        ...

    def commit(self, group: Group, num_tokens: int) -> None:
        """Mark the KV of a reservation's first `num_tokens` tokens as verified and in its pages."""
        ...

    def start(self, group: Group, first_tokens: Seq[tuple[int, bool]]) -> None:
        """Decode a filled reservation. `first_tokens`: (token id, finished) of each sample, in sample order."""
        ...

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """End one sample whose text reached a stop string."""
        ...

    def cancel(self, group: Group) -> None:
        """Free everything that a request holds, in any state. Harmless when it is over."""
        ...

    def load(self) -> EngineLoad:
        """Return the load at this moment."""
        ...

    def snapshot(self) -> KvEvents:
        """Return all reusable blocks."""
        ...

    def report_published(self) -> "array[int] | None":
        """Report published blocks from now on (`StepReport.published`), for holders outside the pages.

        Returns the lives of the pages (`engine.published`), which any thread may read. None: no blocks can be
        copied out of the pages.
        """
        ...

    def hot_prefixes(self, max_blocks: int) -> list[PrefixChain]:
        """Return the most valuable `max_blocks` blocks of the cache."""
        ...

    def forget(self, root: HashRoot) -> ForgottenPages:
        """Drop the cached blocks of a root (`common.block_hash`) that nobody holds."""
        ...

    def expect_return(self, ends: Seq[BlockHash], curve: ReturnCurve) -> None:
        """Keep the cached blocks of a turn that has ended as long as a curve says.

        `ends`: hashes of its last block, and of earlier ones that count where that is not cached.
        """
        ...

    def change_limits(self, limits: SchedulerLimits) -> None:
        """Take the limits of another pool; nothing is running."""
        ...

    def take_timing(self, timing: TimingModel) -> None:
        """Plan by these predictions from now on."""
        ...
