"""Guards of the code against faults, as edits that take them out; for `benchmarks.prover`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Text of a file that is replaced. It stands there once."""

    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Return the text after the edit. Raises ValueError when the old one is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"cannot edit {self.file}: {self.old!r} stands there {text.count(self.old)} times, not once"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Something that keeps a fault from doing harm."""

    name: str
    edits: tuple[Edit, ...]


def _guard(name: str, file: str, old: str, new: str) -> Guard:
    return Guard(name=name, edits=(Edit(file=file, old=old, new=new),))


GUARDS = (
    Guard(
        name="duplicate tokens are dropped by index",
        edits=(
            Edit(
                file="router/ledger.py",
                old="            if token.token_index == position and not sample.is_finished:",
                new="            if not sample.is_finished:",
            ),
            Edit(
                file="router/ledger.py",
                old="            if self._samples[index].is_finished or end <= length:",
                new="            if self._samples[index].is_finished:",
            ),
            Edit(file="router/ledger.py", old="            if first < length:", new="            if False:"),
        ),
    ),
    _guard(
        "a handoff ends when its puller leaves",
        "kv_transfer/serve.py",
        '                    self._table.abort(handoff, HandoffGone("the puller went away"))',
        "                    pass",
    ),
    _guard(
        "the watchdog ends a process whose step hangs",
        "worker/step_watch.py",
        "        if step is None or self._age_s <=",
        "        if True or step is None or self._age_s <=",
    ),
    _guard(
        "the watchdog ends a process whose event loop hangs",
        "common/watchdog.py",
        "        if self.standing_s > LOOP_HUNG_S:",
        "        if False:",
    ),
    _guard(
        "calls of a broken stream end",
        "router/decode_stream.py",
        "        for call in calls.values():\n            call.end(error)",
        "        calls.clear()",
    ),
    _guard(
        "a broken prefill call raises at the router",
        "router/worker_client.py",
        "        except StopAsyncIteration:\n            return None\n        except grpc.aio.AioRpcError as error:\n"
        "            raise from_rpc_error(error) from error",
        "        except StopAsyncIteration:\n            return None\n        except grpc.aio.AioRpcError:\n"
        "            await asyncio.Event().wait()\n            raise",
    ),
    _guard(
        "a grant that comes after a cancellation is undone",
        "engine/thread.py",
        "            self.post(lambda core: undo(core, box[0]) if box else None)\n",
        "",
    ),
    _guard(
        "quarantine holds across routers",
        "worker/prefill_gate.py",
        "        if self._num_calls.keys() - {spec.request_id}:",
        "        if False:",
    ),
    _guard(
        "a silent worker has not ended",
        "router/member.py",
        "        return self.state is not WorkerState.READY and not self.is_silent",
        "        return self.state is not WorkerState.READY",
    ),
    _guard(
        "few tokens clear no suspect",
        "router/crash_budget.py",
        "NUM_CLEARING_TOKENS = 32\n",
        "NUM_CLEARING_TOKENS = 1\n",
    ),
    _guard(
        "an attempt counts as one loss",
        "router/crash_budget.py",
        "        return sum(claim(attempt, set()) for attempt in dict.fromkeys(self.attempts))",
        "        return len({*ended} & {*self.lives})",
    ),
    _guard(
        "a request that ends its workers is refused",
        "router/crash_budget.py",
        "        if num_lost < self._max_lost + is_in_doubt:\n            return",
        "        return",
    ),
    _guard(
        "leases expire",
        "kv_transfer/handoff.py",
        "            if is_waiting and now_s - handoff.idle_since_s > self._lease_ttl_s:",
        "            if False:",
    ),
    _guard(
        "missing blocks fail a transfer",
        "kv_transfer/wanted.py",
        '        if missing:\n            raise KvIncomplete(f"{len(missing)} blocks of {self} are missing")',
        "        del missing",
    ),
    _guard(
        "a wrong checksum fails a transfer",
        "kv_transfer/transports/grpc_chunks.py",
        "        if xxhash.xxh3_64_intdigest(data) != chunk.checksum:",
        "        if False:",
    ),
    _guard(
        "silent workers are noticed",
        "router/silence.py",
        "        for member, silent_s in silent:",
        "        for member, silent_s in silent[:0]:",
    ),
    _guard(
        "overdue steps are told to routers",
        "worker/service.py",
        "overdue=overdue is not None and overdue.look()",
        "overdue=False",
    ),
    _guard(
        "a failed worker is suspected",
        "router/fleet.py",
        "            self._enter(member, WorkerState.CONNECTING, why)\n            self._links[worker_id].restart()",
        "            pass",
    ),
    _guard(
        "a released booking frees its workers",
        "router/bookings.py",
        "            hold.member.remove_hold(hold)\n",
        "            hold.member.end_use(hold)\n",
    ),
    _guard(
        "a request that leaves the line is forgotten",
        "router/admission/line.py",
        "            self._queue.discard(place)\n",
        "",
    ),
    _guard(
        "an ended call frees its pages",
        "decode_worker/call.py",
        "                runtime.engine.post(lambda core: core.cancel(group))\n",
        "",
    ),
    _guard(
        "a closed call is cancelled at the worker",
        "decode_worker/shared_stream.py",
        "            call.task.cancel()\n\n    def _tell",
        "\n    def _tell",
    ),
    Guard(
        name="pages of steps in flight are held back",
        edits=(
            Edit(
                file="engine/scheduler.py",
                old="        if sequence.num_in_flight == 0:\n            self.pages.release(sequence)",
                new="        self.pages.release(sequence)",
            ),
            Edit(
                file="engine/scheduler.py",
                old="            if sequence.state is SequenceState.FINISHED and sequence.num_in_flight == 0:",
                new="            if False:",
            ),
        ),
    ),
    _guard(
        "a worker refuses another life's epoch",
        "worker/runtime.py",
        "        if epoch != self.epoch:\n",
        "        if False:\n",
    ),
    _guard(
        "samples that have begun continue apart",
        "router/orchestrator.py",
        "            if len(leg.samples) > 1 and ledger.num_tokens and not",
        "            if False and ledger.num_tokens and not",
    ),
)
"""Each is in the code for a fault that the walk knows."""
