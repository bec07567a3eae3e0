"""Pause of clients when a process is killed in the middle of their streams: a worker, a router, the controller.

    python -m benchmarks.kill decode|prefill|router [--stop] [--launcher local|ray] [--engine fake|torch] [--rounds 2]
    python -m benchmarks.kill router|controller [--stop] --address HOST:1,HOST:2 --pid PID

Method. 1P+1D of the default model in fp32, so that texts can be compared; 2P+2D with --stop, since a worker that is
stopped and has no like keeps its answers until it is replaced. For a worker: one router and 8 sampled
streams of 128 tokens; every prompt is handed over. For a router: two of them and 16 streams of 160 tokens, the even
ones through router-0 and the odd ones through router-1, by clients that know both. Seeds are fixed, and every round has
prompts of its own. Once every stream has its first tokens, the process gets SIGKILL, or SIGSTOP with --stop; a prefill
worker gets it while it reads. The same requests are then sent again, undisturbed, and every text must be the same.

Reported: failed requests, texts that differ, the largest gap between two tokens of each stream whose router died, of
each other one and of the undisturbed ones, the largest TTFT, and the seconds from the kill until the worker's successor
is ready in the router, or until the killed router answers again. All processes, the starting ones included, share this
machine's cores.

With --address an existing cluster is measured; then --pid, on this host, is the process to kill: a router's, or for
`controller` the supervisor's or the controller's, whose death no client should see at all.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.answers import Answer, differences, read, story
from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from cluster.processes.state import StateFile
from kvrelay.client import AsyncClient, Token, WorkerStatus

NUM_BEGUN = 5
"""Tokens of every stream before the kill."""
_WORKERS = ("decode", "prefill")
_BACK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster to hurt, and the load meanwhile."""

    victim: str
    addresses: tuple[str, ...]
    """Routers; the first one is killed when a router is the victim."""
    find_pid: Callable[[], int]
    """Returns the process to kill; a worker's is asked from the router instead."""
    tls: bool | str | None = None
    """How clients connect, as `kvrelay.client.tls.Tls`."""
    signal: signal.Signals
    num_streams: int
    num_tokens: int

    @property
    def case(self) -> str:
        """Title of its figures."""
        return f"{self.victim} {'killed' if self.signal is signal.SIGKILL else 'stopped'}"


async def _pass(
    target: Target, number: int, kill: Callable[[Sequence[asyncio.Event]], Awaitable[float | None]] | None
) -> tuple[list[Answer], float | None]:
    """Send the streams of a round, in turn through each router; returns the answers, and what `kill` returns.

    `kill` gets the events of all streams, which are set when a stream has its first tokens or has failed.
    """
    addresses, first = target.addresses, number * target.num_streams
    begun = [asyncio.Event() for _ in range(target.num_streams)]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient([*addresses[at:], *addresses[:at]], timeout_s=600, tls=target.tls)
            )
            for at in range(len(addresses))
        ]
        asking = [
            asyncio.create_task(_ask(clients[idx % len(clients)], first + idx, target.num_tokens, event))
            for idx, event in enumerate(begun)
        ]
        back_s = None if kill is None else await kill(begun)
        return await asyncio.gather(*asking), back_s


async def _ask(client: AsyncClient, number: int, num_tokens: int, begun: asyncio.Event) -> Answer:
    def on_token(token: Token) -> None:
        if token.token_index + 1 >= NUM_BEGUN:
            begun.set()

    answer = await read(story(client, number, num_tokens=num_tokens), on_token=on_token)
    begun.set()
    return answer


async def _kill(target: Target, begun: Sequence[asyncio.Event]) -> float | None:
    """Kill the victim; returns the seconds until it is back, None for a controller."""
    if target.victim in _WORKERS:
        return await _kill_worker(target, begun)
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(target.find_pid(), target.signal)
    killed_s = time.perf_counter()
    if target.victim == "controller":
        return None
    address = target.addresses[0]
    async with AsyncClient(address, timeout_s=_BACK_TIMEOUT_S, max_attempts=1000, tls=target.tls) as client:
        await client.generate("Are you back?", max_tokens=1)
    return time.perf_counter() - killed_s


async def _kill_worker(target: Target, begun: Sequence[asyncio.Event]) -> float:
    """Kill a pool's worker; returns the seconds until its successor is ready in the router."""
    async with AsyncClient(target.addresses[0], timeout_s=_BACK_TIMEOUT_S, tls=target.tls) as client:

        async def status_when(condition: Callable[[str, WorkerStatus], bool]) -> tuple[str, WorkerStatus]:
            async with asyncio.timeout(_BACK_TIMEOUT_S):
                while True:
                    for view in (await client.status()).workers:
                        if view.role == target.victim and view.status and condition(view.worker_id, view.status):
                            return view.worker_id, view.status
                    await asyncio.sleep(0.02)

        if target.victim == "decode":
            await asyncio.gather(*(event.wait() for event in begun))
        victim, before = await status_when(lambda _name, status: status.load.num_running > 0)
        os.kill(before.pid, target.signal)
        killed_s = time.perf_counter()
        await status_when(lambda name, status: name == victim and status.pid != before.pid)
        return time.perf_counter() - killed_s


async def measure(target: Target, figures: Figures, *, num_rounds: int, console: Console) -> bool:
    """Run the rounds; returns whether nothing failed and no text differs."""
    is_clean = True
    await _pass(target, num_rounds, None)  # warms up
    for number in range(num_rounds):
        hurt, back_s = await _pass(target, number, lambda begun: _kill(target, begun))
        calm, _ = await _pass(target, number, None)
        failures, num_different = differences(hurt, calm)
        console.print(f"{len(hurt)} streams, {len(failures)} failed, {num_different} texts differ")
        for failure in failures:
            console.print(failure)
        is_clean = is_clean and not failures and not num_different
        num_routers = len(target.addresses)
        groups = {f"clients of router-{at}": hurt[at::num_routers] for at in range(num_routers)}
        for arm, answers in (groups | {"undisturbed": calm}).items():
            _add(figures, target.case, arm, answers)
        if back_s is not None:
            figures.add("back", target.case, target.victim, back_after_s=back_s)
    return is_clean


def _add(figures: Figures, case: str, arm: str, answers: Sequence[Answer]) -> None:
    gaps_s = [answer.largest_gap_s for answer in answers]
    figures.add(
        "streams",
        case,
        arm,
        largest_gap_s=max(gaps_s),
        median_of_largest_gaps_s=quantile(gaps_s, 0.5),
        largest_TTFT_s=max(answer.ttft_s for answer in answers if answer.stamps_s),
        went_on_by_a_further_plan=sum(answer.has_moved for answer in answers),
    )


@contextmanager
def _target(args: argparse.Namespace, console: Console) -> Iterator[Target]:
    """Yield what the arguments name: a running cluster, or one that is started for it."""
    is_worker = args.victim in _WORKERS
    num_streams, num_tokens = (8, 128) if is_worker else (16, 160)
    number = signal.SIGSTOP if args.stop else signal.SIGKILL
    pools = {pool: {"count": 2, "threads": 1} for pool in _WORKERS} if args.stop and is_worker else {}
    if args.address is not None:
        addresses = tuple(args.address.split(","))
        yield Target(
            victim=args.victim,
            addresses=addresses,
            find_pid=lambda: args.pid,
            signal=number,
            num_streams=num_streams,
            num_tokens=num_tokens,
        )
        return
    fake: dict[str, Any] = {"engine": "fake", "fake_step_ms": 10.0, "max_model_len": 4096}
    with running_doors(
        launcher=args.launcher,
        console=console,
        model=fake if args.engine == "fake" else {"dtype": "float32"},
        pools=pools if is_worker else ONE_THREAD_EACH,
        router={"local_prefill_max_tokens": 32} if is_worker else {"count": 2},
    ) as (info, _config):
        yield Target(
            victim=args.victim,
            addresses=info.addresses,
            find_pid=lambda: _router_pid(info.run_dir),
            tls=info.tls,
            signal=number,
            num_streams=num_streams,
            num_tokens=num_tokens,
        )


def _router_pid(run_dir: Path) -> int:
    state = StateFile(run_dir).read()
    assert state is not None, "a cluster that runs has a state"
    router = next(process for process in state.processes if process.name == "router-0").identity
    assert router is not None, "the first router runs on this host"
    return router.pid


def main() -> None:
    """Run the benchmark."""
    parser = command_line("kill", __doc__, rounds=2, has_launcher=True)
    parser.add_argument("victim", choices=[*_WORKERS, "router", "controller"], help="what is killed")
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="the default model, or none")
    parser.add_argument("--stop", action="store_true", help="stop it (SIGSTOP) instead of killing it")
    parser.add_argument("--address", help="routers of a running cluster, separated by a comma; one round is measured")
    parser.add_argument("--pid", type=int, help="the process to kill, with --address")
    args = parser.parse_args()
    if (args.address is None) != (args.pid is None) or (args.victim == "controller") > (args.address is not None):
        parser.error("--address and --pid go together, and a controller needs them")
    console, figures = terminal(), Figures()
    num_rounds = args.rounds if args.address is None else 1
    with _target(args, console) as target:
        is_clean = asyncio.run(measure(target, figures, num_rounds=num_rounds, console=console))
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/kill.py")
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
