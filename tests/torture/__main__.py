"""Runs the torture; see the package. The log has a line of JSON for each event."""

import argparse
import asyncio
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.faults import CannotInflict, PrivateNetwork
from cluster.processes.state import StateFile
from kvrelay.client import AsyncClient, Event, KvrelayError, PlanChosen, Token
from tests.builders import expected_tokens, make_request
from tests.e2e.harness import FAKE_POOL, fake_config, held, running_cluster, until
from tests.torture.faults import Inflict, draw_kind, draw_seconds, find_kinds

NUM_STREAMS = 8
REQUEST_S = 240.0
"""Deadline of a request: longer than any pile of faults."""
WHOLE_S = 120.0
MEAN_PAUSE_S = 4.0
NOTED_WAIT_S = 3.0
"""Waits for a token from which on the log has a line."""
NUM_WORKERS = {"prefill": 2, "decode": 3}
SLOW_DRAIN_S = 10.0
_DISK_BYTES = 96 << 20
_CLONE_NEWNS = 0x00020000


@dataclass
class Torture:
    """One run."""

    draw: random.Random
    client: AsyncClient
    run_dir: Path
    kinds: dict[str, Inflict]
    log: TextIO
    begun_s: float = field(default_factory=time.monotonic)
    is_over: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    hurt: set[str] = field(default_factory=set)
    """Processes that a fault concerns now."""
    num_requests: int = 0
    num_tokens: int = 0
    longest_first_s: float = 0.0
    """Longest wait for the first token of an answer."""
    longest_gap_s: float = 0.0
    """Longest wait for any other."""
    wrong: list[str] = field(default_factory=list)
    """Broken invariants."""

    def note(self, event: str, **more: Any) -> None:
        """Write a line of the log."""
        line = {"s": round(time.monotonic() - self.begun_s, 2), "event": event, **more}
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    def note_wait(self, lane: int, wait_s: float, plans: list[tuple[float, str]], *, is_first: bool) -> None:
        """Note how long a token took, and write a long wait with what was planned before and in it."""
        if is_first:
            self.longest_first_s = max(self.longest_first_s, wait_s)
        else:
            self.longest_gap_s = max(self.longest_gap_s, wait_s)
        if wait_s >= NOTED_WAIT_S:
            told = [(round(at_s - self.begun_s, 2), workers) for at_s, workers in plans[-8:]]
            self.note("first token" if is_first else "gap", lane=lane, wait_s=round(wait_s, 2), plans=told)

    async def stream(self, lane: int) -> None:
        """Send one request after the other and check every token."""
        draw = random.Random(f"{self.draw.random()} {lane}")
        while not self.is_over:
            prompt = [32 + draw.randrange(64) for _ in range(draw.choice((12, 60, 200, 700)))]
            sampling: dict[str, Any] = {
                "temperature": 0.8,
                "seed": draw.randrange(1 << 30),
                "max_tokens": draw.choice((20, 100, 300)),
            }
            expected = tuple(expected_tokens(make_request(prompt, ignore_eos=True, **sampling)))
            got: list[int] = []
            waits = Waits(self, lane)
            try:
                stream = self.client.stream(prompt, timeout_s=REQUEST_S, ignore_eos=True, **sampling)
                async with stream:
                    async for event in stream:
                        waits.see(event)
                        if isinstance(event, Token):
                            got.append(event.token_id)
            except KvrelayError as error:
                self._violate(f"request failed after {len(got)} of {len(expected)} tokens: {error!r}")
            if tuple(got) != expected[: len(got)] or (len(got) > len(expected)):
                self._violate(f"wrong tokens: {got} instead of {expected}")
            self.num_requests += 1
            self.num_tokens += len(got)

    async def rage(self, seconds: float) -> None:
        """Draw faults for a time; returns when all have ended."""
        ends_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as raging:
            while (left_s := ends_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, self.draw.expovariate(1 / MEAN_PAUSE_S)))
                kind, lasts_s = draw_kind(self.draw, self.kinds), draw_seconds(self.draw)
                victim = self._draw_victim()
                if victim is not None:
                    raging.create_task(self._befall(kind, *victim, min(lasts_s, max(0.3, ends_s - time.monotonic()))))

    def _draw_victim(self) -> tuple[str, int] | None:
        """Return a process whose loss leaves a router and a decode worker without any fault; None: there is none."""
        state = StateFile(self.run_dir).read()
        assert state is not None, "a cluster that runs has a state"
        processes = {each.name: each.identity for each in state.processes}
        name = self.draw.choice(sorted(processes))
        role = name.rpartition("-")[0]
        well = [each for each in processes if each.startswith(role) and each not in self.hurt and processes[each]]
        identity = processes[name]
        if identity is None or name in self.hurt or (role != "prefill" and len(well) < 2):
            return None
        return name, identity.pid

    async def _befall(self, kind: str, name: str, pid: int, lasts_s: float) -> None:
        self.faults[kind] += 1
        self.hurt.add(name)
        self.note("fault", kind=kind, victim=name, pid=pid, lasts_s=round(lasts_s, 2))
        try:
            async with self.kinds[kind](pid):
                await asyncio.sleep(lasts_s)
            self.note("fault over", kind=kind, victim=name)
            with suppress(AssertionError):  # it counts as hurt until it serves, but not for ever
                await until(lambda: self._serves(name), timeout_s=30, what=f"{name} serves")
        except OSError as error:
            self.note("fault failed", kind=kind, victim=name, error=str(error))
        finally:
            self.hurt.discard(name)

    async def _serves(self, name: str) -> bool:
        try:
            status = await self.client.status(timeout_s=5)
        except KvrelayError:
            return False
        if name.startswith("router"):
            state = StateFile(self.run_dir).read()
            return state is not None and all(each.phase == "ready" for each in state.processes if each.name == name)
        return any(view.worker_id == name and view.state == "ready" for view in status.workers)

    async def recover(self) -> None:
        """Wait until the pools are whole and nothing is held."""

        async def is_whole() -> bool:
            try:
                status = await self.client.status(timeout_s=5)
                states = Counter(view.role for view in status.workers if view.state == "ready")
                return states == NUM_WORKERS and not await held(self.client)
            except KvrelayError:
                return False

        try:
            took_s = await until(is_whole, timeout_s=WHOLE_S, what="the pools are whole and nothing is held")
            self.note("whole", after_s=round(took_s, 2))
        except AssertionError as error:
            states = {view.worker_id: view.state for view in (await self.client.status()).workers}
            self._violate(f"{error}: {states}, {await held(self.client)}")

    def _violate(self, what: str) -> None:
        self.wrong.append(what)
        self.note("VIOLATION", what=what)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run."""
        return {
            "minutes": round((time.monotonic() - self.begun_s) / 60, 2),
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "faults": dict(self.faults.most_common()),
            "longest_first_s": round(self.longest_first_s, 2),
            "longest_gap_s": round(self.longest_gap_s, 2),
            "violations": self.wrong,
        }


@dataclass
class Waits:
    """The waits for the tokens of one answer."""

    run: Torture
    lane: int
    last_s: float = field(default_factory=time.monotonic)
    has_token: bool = False
    plans: list[tuple[float, str]] = field(default_factory=list)

    def see(self, event: Event) -> None:
        """Take an event of the answer."""
        now_s = time.monotonic()
        match event:
            case PlanChosen():
                self.plans.append((now_s, f"{event.prefill_worker_id or 'local'} {event.decode_worker_id}"))
            case Token():
                self.run.note_wait(self.lane, now_s - self.last_s, self.plans, is_first=not self.has_token)
                self.last_s, self.has_token = now_s, True


async def torture(args: argparse.Namespace, folder: Path, kinds: dict[str, Inflict], log: TextIO) -> dict[str, Any]:
    """Run it; returns the figures."""
    pools = {pool: {**FAKE_POOL, "count": count, "slow_drain_s": SLOW_DRAIN_S} for pool, count in NUM_WORKERS.items()}
    router = {"port": 0, "count": 2, "local_prefill_max_tokens": 32, "silence_s": 1.0, "recovery_timeout_s": 120.0}
    async with running_cluster(folder, fake_config(pools=pools, step_ms=5, router=router)) as client:
        run = Torture(random.Random(args.seed), client, folder / "run", kinds, log)
        streams = [asyncio.create_task(run.stream(lane)) for lane in range(NUM_STREAMS)]
        try:
            await run.rage(60 * args.minutes)
            run.note("faults are over")
        finally:
            run.is_over = True
            await asyncio.gather(*streams)
        await run.recover()
    return run.summary()


def small_disk(folder: Path) -> Path | None:
    """Mount a small tmpfs on `folder`, for this process and its children alone; None where that is impossible."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return None
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)],
    ):
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            return None
    return folder


def main() -> int:
    """Run the torture of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description="Faults of real processes.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults and requests")
    parser.add_argument("--log", type=Path, default=Path("torture.jsonl"), help="file of the events")
    args = parser.parse_args()
    network = None
    with suppress(CannotInflict, OSError):
        network = PrivateNetwork()
    with tempfile.TemporaryDirectory(prefix="torture-") as name, args.log.open("w", encoding="utf-8") as log:
        disk = small_disk(Path(name))
        kinds, missing = find_kinds(network, disk)
        for what, why in missing.items():
            print(f"left out: {what}: {why}", file=sys.stderr)  # noqa: T201
        log.write(json.dumps({"seed": args.seed, "kinds": sorted(kinds), "left_out": missing}) + "\n")
        os.environ["KVRELAY_RUN_DIR"] = name
        try:
            summary = {"seed": args.seed} | asyncio.run(torture(args, Path(name), kinds, log))
        finally:
            if disk is not None:
                subprocess.run(["umount", "--lazy", name], check=False)
        log.write(json.dumps({"summary": summary}) + "\n")
    print(json.dumps(summary, indent=1))  # noqa: T201
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
