"""Pause of clients when one of two routers is killed: sixteen streams, half through each; kill -9 of the first.

    python -m benchmarks.failover [--launcher local|ray] [--engine fake|torch] [--tokens 160] [--json FILE]
    python -m benchmarks.failover --address HOST:1,HOST:2 --kill controller --pid PID [--json FILE]

Method. 1P+1D and two routers. Sixteen sampled streams with fixed seeds are answered once, undisturbed; the same
sixteen are sent again, the even ones through router-0 and the odd ones through router-1, by clients that know both.
Once every stream has its first tokens, the process is killed with SIGKILL. Reported: failed requests, texts that
differ from the undisturbed ones, the largest gap between two tokens of each stream whose router died and of each
other one, the largest ones of the undisturbed run, and the seconds from the kill until the killed router answers a
request again. The default model runs in fp32, so that texts can be compared. All processes, the starting ones
included, share this machine's cores.

With --address an existing cluster is measured; then the process to kill is named by --pid, on this host: a router's,
or with `--kill controller` the supervisor's or the controller's, whose death no client should see at all.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.answers import Answer, differences, read, story
from benchmarks.clusters import ONE_THREAD_EACH, running_doors
from benchmarks.command import command_line, terminal, write_json
from benchmarks.figures import quantile
from cluster.processes.state import StateFile
from kvrelay.client import AsyncClient, Token

NUM_STREAMS = 16
NUM_BEGUN = 5
"""Tokens of every stream before the kill."""
_BACK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster to hurt."""

    addresses: tuple[str, ...]
    kill: Callable[[], None]
    is_router: bool
    """Whether the first router is what is killed."""
    tls: bool | str | None = None
    """How clients connect, as `kvrelay.client.tls.Tls`."""


async def _ask(client: AsyncClient, number: int, num_tokens: int, begun: asyncio.Event) -> Answer:
    """Read one stream; sets `begun` once it has its first tokens or has failed."""

    def on_token(token: Token) -> None:
        if token.token_index + 1 >= NUM_BEGUN:
            begun.set()

    answer = await read(story(client, number, num_tokens=num_tokens), on_token=on_token)
    begun.set()
    return answer


async def _pass(target: Target, num_tokens: int, all_begun: Callable[[], None]) -> list[Answer]:
    """Send all streams, in turn through each router; returns the answers.

    `all_begun` is called when each stream has its first tokens.
    """
    addresses = target.addresses
    clients = [
        AsyncClient([*addresses[at:], *addresses[:at]], timeout_s=600, tls=target.tls) for at in range(len(addresses))
    ]
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    asking = [
        asyncio.create_task(_ask(clients[number % len(clients)], number, num_tokens, begun[number]))
        for number in range(NUM_STREAMS)
    ]
    try:
        for event in begun:
            await event.wait()
        all_begun()
        return await asyncio.gather(*asking)
    finally:
        for client in clients:
            await client.aclose()


async def _until_back(target: Target, killed_s: float) -> float:
    """Return the seconds from the kill until the first router answers a request."""
    address = target.addresses[0]
    async with AsyncClient(address, timeout_s=_BACK_TIMEOUT_S, max_attempts=1000, tls=target.tls) as client:
        await client.generate("Are you back?", max_tokens=1)
    return time.perf_counter() - killed_s


async def measure(target: Target, num_tokens: int) -> tuple[list[Answer], list[Answer], float | None]:
    """Return the undisturbed streams, the disturbed ones, and after how long the killed router served again."""
    calm = await _pass(target, num_tokens, lambda: None)
    back: list[asyncio.Task[float]] = []

    def kill() -> None:
        target.kill()
        if target.is_router:
            back.append(asyncio.create_task(_until_back(target, time.perf_counter())))

    hurt = await _pass(target, num_tokens, kill)
    return calm, hurt, await back[0] if back else None


def _report(calm: Sequence[Answer], hurt: Sequence[Answer], back_s: float | None, console: Console) -> bool:
    """Print what was seen; returns whether nothing failed and no text differs."""
    failures, num_different = differences(hurt, calm)
    console.print(f"{len(hurt)} streams, {len(failures)} failed, {num_different} texts differ")
    for name, answers in (("router killed", hurt[::2]), ("the other router", hurt[1::2]), ("undisturbed", calm)):
        gaps_s = [answer.largest_gap_s for answer in answers]
        console.print(
            f"{name}: largest gap of a stream, median {quantile(gaps_s, 0.5):.3f} s, largest {max(gaps_s):.3f} s;"
            f" {sum(answer.has_moved for answer in answers)} of {len(answers)} went on by a further plan"
        )
    if back_s is not None:
        console.print(f"the killed router answered again after {back_s:.2f} s")
    for failure in failures:
        console.print(failure)
    return not failures and not num_different


def _record(number: int, answer: Answer) -> dict[str, object]:
    return {
        "number": number,
        "text": answer.text,
        "largest_gap_s": answer.largest_gap_s,
        "has_moved": answer.has_moved,
        "failure": str(answer.error or ""),
    }


@contextmanager
def _target(args: argparse.Namespace, console: Console) -> Iterator[Target]:
    """Yield what the arguments name: a running cluster, or one that is started for it."""
    if args.address is not None:
        addresses = tuple(args.address.split(","))
        yield Target(
            addresses=addresses, kill=partial(os.kill, args.pid, signal.SIGKILL), is_router=args.kill == "router"
        )
        return
    model: dict[str, Any] = (
        {"engine": "fake", "fake_step_ms": 10.0, "max_model_len": 4096} if args.engine == "fake" else {}
    )
    with running_doors(
        launcher=args.launcher,
        console=console,
        model=model or {"dtype": "float32"},
        pools=ONE_THREAD_EACH,
        router={"count": 2},
    ) as (info, _config):
        state = StateFile(info.run_dir).read()
        assert state is not None, "a cluster that runs has a state"
        router = next(process for process in state.processes if process.name == "router-0").identity
        assert router is not None, "the first router runs on this host"
        kill = partial(os.kill, router.pid, signal.SIGKILL)
        yield Target(addresses=info.addresses, kill=kill, is_router=True, tls=info.tls)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("failover", __doc__, has_launcher=True)
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="the default model, or none")
    parser.add_argument("--tokens", type=int, default=160, help="length of each answer (default 160)")
    parser.add_argument("--address", help="routers of a running cluster, separated by a comma")
    parser.add_argument("--kill", choices=["router", "controller"], default="router", help="what --pid is")
    parser.add_argument("--pid", type=int, help="the process to kill, with --address")
    args = parser.parse_args()
    if (args.address is None) != (args.pid is None) or (args.kill == "controller" and args.address is None):
        parser.error("--address and --pid go together, and --kill controller needs them")
    console = terminal()
    with _target(args, console) as target:
        calm, hurt, back_s = asyncio.run(measure(target, args.tokens))
    is_clean = _report(calm, hurt, back_s, console)
    passes = {
        name: [_record(*each) for each in enumerate(found)] for name, found in (("undisturbed", calm), ("killed", hurt))
    }
    write_json(args.json, passes | {"back_s": back_s})
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
