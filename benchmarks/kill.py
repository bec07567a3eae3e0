"""Pause of clients when a process fails in the middle of their streams: a worker, a router, the controller.

    python -m benchmarks.kill decode|prefill [--fault kill|stop|slow|hang|cut] [--launcher local|ray]
                                             [--engine fake|torch] [--rounds 2]
    python -m benchmarks.kill router [--fault kill|stop] ...
    python -m benchmarks.kill controller [--fault kill|stop] [--rounds 2]
    python -m benchmarks.kill router|controller [--fault kill|stop] --address HOST:1,HOST:2 --pid PID

Method. 1P+1D of the default model in fp32, so that texts can be compared; 2P+2D for every fault but `kill`, since a
worker without another of its kind keeps its answers until it is replaced. For a worker: one router and 8 sampled
streams of 128 tokens, every prompt handed over; for a prefill worker the prompts are seven times as long, so that it
is reading when the fault comes. For a router: two of them and 16 streams of 160 tokens, the even ones through router-0
and the odd ones through router-1, by clients that know both. Seeds are fixed, and every round has prompts of its own.
The fault comes once every stream has its first tokens, for a prefill worker while it reads. The same requests are then
sent again, undisturbed, and every text must be the same.

- `hang` (fake engine): a poison prompt, given up soon after its plan, hangs a step of one worker. All have measured
  their steps by then; before, a hang is told from a compilation only after 10 minutes. For a decode worker there are
  no prefill workers, which would compute the prompt.
- `slow`: the process runs one part in ten of the time, under streams of 1,500 tokens, with `slow_drain_s: 5` s, until
  it is kept out of use, and is then left alone until it is used again.
- `cut`: all listeners of the worker, in both directions, in a network of this benchmark's own; for good, as its
  successor has other ports. The worker's own calls to others are not cut.

Reported: failed requests, texts that differ, the largest gap between two tokens of each stream whose router died, of
each other one and of the undisturbed ones, the largest TTFT, and the seconds from the fault until the worker's
successor is ready in the router, or until the router that failed answers again. All processes, the starting ones
included, share this machine's cores.

A controller that dies has a successor only in a Ray cluster that kvrelay joins: one of a single node is started for it.
It is back when state.json says that it looks after everything.

With --address an existing cluster is measured; then --pid, on this host, is the process to hurt: a router's, or for
`controller` the supervisor's or the controller's, whose death no client should see at all.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.answers import Answer, differences, read, story
from benchmarks.clusters import ONE_THREAD_EACH, joined_ray, running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.faults import CannotInflict, Fault, PrivateNetwork, send
from benchmarks.figures import Figures, quantile
from benchmarks.hurt import WORKERS, WorkerHurt
from cluster.processes.state import ClusterPhase, StateFile
from common.process import ProcessIdentity
from engine.fake import FAULTS_ENV
from kvrelay.client import AsyncClient, Token

NUM_BEGUN = 5
"""Tokens of every stream before the fault."""
NUM_REPEATS = {"prefill": 40}
"""Length of the prompts by victim, in sentences."""
SLOW_DRAIN_S = 5.0
_SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.STOP: signal.SIGSTOP}
_PAST = {Fault.KILL: "killed", Fault.STOP: "stopped", Fault.SLOW: "slow", Fault.HANG: "hung", Fault.CUT: "cut off"}
_BACK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster to hurt, and the load meanwhile."""

    victim: str
    fault: Fault
    addresses: tuple[str, ...]
    """Routers; the first one is hurt when a router is the victim."""
    find_pid: Callable[[], int]
    """Returns the process to hurt; a worker's is asked from the router instead."""
    tls: bool | str | None = None
    """How clients connect, as `kvrelay.client.tls.Tls`."""
    network: PrivateNetwork | None = None
    is_back: Callable[[], bool] | None = None
    """Whether a successor of the controller of `find_pid`'s last answer is in charge; None for others' clusters."""
    num_streams: int
    num_tokens: int

    @property
    def case(self) -> str:
        """Title of its figures."""
        return f"{self.victim} {_PAST[self.fault]}"


Hurt = Callable[[Sequence[asyncio.Event]], Awaitable[dict[str, float]]]
"""Hurts the victim, given the events of all streams, which are set when a stream has its first tokens or has failed;
returns how long what followed took, in seconds by name."""


async def _pass(target: Target, number: int, hurt: Hurt | None) -> tuple[list[Answer], dict[str, float]]:
    """Send the streams of a round, in turn through each router; returns the answers, and what `hurt` returns."""
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
            asyncio.create_task(_ask(clients[idx % len(clients)], target, first + idx, event))
            for idx, event in enumerate(begun)
        ]
        times = {} if hurt is None else await hurt(begun)
        return await asyncio.gather(*asking), times


async def _ask(client: AsyncClient, target: Target, number: int, begun: asyncio.Event) -> Answer:
    def on_token(token: Token) -> None:
        if token.token_index + 1 >= NUM_BEGUN:
            begun.set()

    num_repeats = NUM_REPEATS.get(target.victim, 6)
    answer = await read(story(client, number, num_tokens=target.num_tokens, num_repeats=num_repeats), on_token=on_token)
    begun.set()
    return answer


async def _hurt(target: Target, begun: Sequence[asyncio.Event]) -> dict[str, float]:
    """Hurt a router or a controller; returns the seconds until it is back."""
    await asyncio.gather(*(event.wait() for event in begun))
    send(target.find_pid(), _SIGNALS[target.fault])  # a controller's pid is another one once it is back
    hurt_s = time.perf_counter()
    if target.victim == "controller":
        if target.is_back is None:
            return {}
        async with asyncio.timeout(_BACK_TIMEOUT_S):
            while not target.is_back():  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
        return {"back_after_s": time.perf_counter() - hurt_s}
    address = target.addresses[0]
    async with AsyncClient(address, timeout_s=_BACK_TIMEOUT_S, max_attempts=1000, tls=target.tls) as client:
        await client.generate("Are you back?", max_tokens=1)
    return {"back_after_s": time.perf_counter() - hurt_s}


async def measure(target: Target, figures: Figures, *, num_rounds: int, console: Console) -> bool:
    """Run the rounds; returns whether nothing failed and no text differs."""
    is_clean = True
    await _pass(target, num_rounds, None)  # warms up
    async with AsyncClient(target.addresses[0], timeout_s=_BACK_TIMEOUT_S, tls=target.tls) as client:
        worker_hurt = WorkerHurt(client, target.victim, target.fault, target.network)
        for number in range(num_rounds):
            if target.victim in WORKERS:
                await worker_hurt.prepare()
                hurt, times = await _pass(target, number, worker_hurt.inflict)
            else:
                hurt, times = await _pass(target, number, lambda begun: _hurt(target, begun))
            calm, _ = await _pass(target, number, None)
            failures, num_different = differences(hurt, calm)
            console.print(f"{len(hurt)} streams, {len(failures)} failed, {num_different} texts differ; {times}")
            for failure in failures:
                console.print(failure)
            is_clean = is_clean and not failures and not num_different
            num_routers = len(target.addresses)
            groups = {f"clients of router-{at}": hurt[at::num_routers] for at in range(num_routers)}
            for arm, answers in (groups | {"undisturbed": calm}).items():
                _add(figures, target.case, arm, answers)
            if times:
                figures.add("back", target.case, target.victim, **times)
    return is_clean


def _add(figures: Figures, case: str, arm: str, answers: Sequence[Answer]) -> None:
    whole = [answer for answer in answers if answer.stamps_s]
    gaps_s = [answer.largest_gap_s for answer in answers]
    figures.add(
        "streams",
        case,
        arm,
        largest_gap_s=max(gaps_s),
        median_of_largest_gaps_s=quantile(gaps_s, 0.5),
        largest_TTFT_s=max(answer.ttft_s for answer in whole),
        longest_answer_s=max(answer.stamps_s[-1] - answer.sent_s for answer in whole),
        went_on_by_a_further_plan=sum(answer.has_moved for answer in answers),
    )


@contextmanager
def _target(args: argparse.Namespace, fault: Fault, console: Console) -> Iterator[Target]:
    """Yield what the arguments name: a running cluster, or one that is started for it."""
    is_worker = args.victim in WORKERS
    num_streams, num_tokens = (8, 128) if is_worker else (16, 160)
    if fault is Fault.SLOW:
        num_tokens = 1500
    if args.address is not None:
        addresses = tuple(args.address.split(","))
        yield Target(
            victim=args.victim,
            fault=fault,
            addresses=addresses,
            find_pid=lambda: args.pid,
            num_streams=num_streams,
            num_tokens=num_tokens,
        )
        return
    network = PrivateNetwork() if fault is Fault.CUT else None
    if fault is Fault.HANG:
        os.environ[FAULTS_ENV] = "1"
    pool: dict[str, Any] = {} if fault is Fault.KILL else {"count": 2, "threads": 1, "slow_drain_s": SLOW_DRAIN_S}
    pools = dict.fromkeys(WORKERS, pool)
    if fault is Fault.HANG and args.victim == "decode":
        pools |= {"prefill": {"count": 0}}
    fake: dict[str, Any] = {"engine": "fake", "fake_step_ms": 10.0, "max_model_len": 4096}
    is_controller = args.victim == "controller"
    with ExitStack() as stack:
        if is_controller:
            stack.enter_context(joined_ray(num_cpus=8))
        info, _config = stack.enter_context(
            running_doors(
                launcher="ray" if is_controller else args.launcher,
                console=console,
                model=fake if args.engine == "fake" else {"dtype": "float32"},
                pools=pools if is_worker else ONE_THREAD_EACH,
                router={"local_prefill_max_tokens": 32} if is_worker else {"count": 2},
            )
        )
        controllers = _Controllers(info.run_dir)
        yield Target(
            victim=args.victim,
            fault=fault,
            addresses=info.addresses,
            find_pid=controllers.present if is_controller else lambda: _router_pid(info.run_dir),
            tls=info.tls,
            network=network,
            is_back=controllers.has_changed if is_controller else None,
            num_streams=num_streams,
            num_tokens=num_tokens,
        )


class _Controllers:
    """The lives of a cluster's controller, by its state.json."""

    def __init__(self, run_dir: Path) -> None:
        self._file = StateFile(run_dir)
        self._last: ProcessIdentity | None = None

    def present(self) -> int:
        """Return the pid of the present life."""
        state = self._file.read()
        assert state is not None, "a cluster that runs has a state"
        self._last = state.supervisor
        return state.supervisor.pid

    def has_changed(self) -> bool:
        """Return whether another life than that of `present` is in charge."""
        state = self._file.read()
        return state is not None and state.supervisor != self._last and state.phase is ClusterPhase.READY


def _router_pid(run_dir: Path) -> int:
    state = StateFile(run_dir).read()
    assert state is not None, "a cluster that runs has a state"
    router = next(process for process in state.processes if process.name == "router-0").identity
    assert router is not None, "the first router runs on this host"
    return router.pid


def main() -> None:
    """Run the benchmark."""
    parser = command_line("kill", __doc__, rounds=2, has_launcher=True)
    parser.add_argument("victim", choices=[*WORKERS, "router", "controller"], help="what is hurt")
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="the default model, or none")
    parser.add_argument("--fault", choices=[*Fault], default=Fault.KILL, help="what happens to it (default: kill)")
    parser.add_argument("--address", help="routers of a running cluster, separated by a comma; one round is measured")
    parser.add_argument("--pid", type=int, help="the process to hurt, with --address")
    args = parser.parse_args()
    fault = Fault(args.fault)
    if (args.address is None) != (args.pid is None):
        parser.error("--address and --pid go together")
    if fault not in _SIGNALS and (args.victim not in WORKERS or args.address is not None):
        parser.error(f"--fault {fault} is for the workers of a cluster that is started for it")
    if fault is Fault.HANG and args.engine != "fake":
        parser.error("--fault hang needs --engine fake")
    console, figures = terminal(), Figures()
    num_rounds = args.rounds if args.address is None else 1
    try:
        with _target(args, fault, console) as target:
            is_clean = asyncio.run(measure(target, figures, num_rounds=num_rounds, console=console))
    except CannotInflict as error:
        raise SystemExit(f"cannot cut a worker off: {error}") from error
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/kill.py")
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
