"""Computes the engine's steps on the ranks of a vLLM process group."""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from common.errors import EngineFault
from engine.executor import DoneStep, ScheduledSequence, StepResult
from engine.kv_store import KvStore
from engine.options import CheckpointInfo
from engine.vllm.order import OrderBook, StepOrder
from engine.vllm.rank import RankFailed
from engine.work import StepFloors


class Ranks(Protocol):
    """The part of vLLM's executor that is used here."""

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        """Call a method on all ranks and wait; returns their replies in order."""
        ...


class VllmExecutor:
    """Executor of a model that vLLM runs. Engine thread only."""

    max_steps_in_flight = 1
    verifies_drafts = False
    compiles_steps = True
    exact_resume = False
    floors: StepFloors | None = None

    def __init__(self, ranks: Ranks, store: KvStore, info: CheckpointInfo, *, hidden_size: int) -> None:
        self.kv = store
        self.max_model_len = info.max_model_len
        self.vocab_size = info.vocab_size
        self.hidden_size = hidden_size
        self.eos_token_ids = info.eos_token_ids
        self.model_name = info.name
        self._ranks = ranks
        self._book = OrderBook()

    def try_out(self) -> None:
        """Run a step of one token, before any block is in use. Raises EngineFault when the model cannot be computed."""
        self._run(self._book.trial())

    def launch(self, batch: Seq[ScheduledSequence]) -> DoneStep:
        """Run one step before returning. Raises EngineFault when a rank has failed."""
        if not batch:
            return DoneStep([])
        try:
            return DoneStep(self._run(self._book.order(batch)))
        except Exception:
            self._book.forget()
            raise

    def _run(self, order: StepOrder) -> list[StepResult]:
        replies = self._ranks.collective_rpc("kvrelay_step", args=(order,))
        failed = next((reply for reply in replies if isinstance(reply, RankFailed)), None)
        if failed is not None:
            raise EngineFault(failed.reason)
        results: list[StepResult] = replies[0]
        return results
