"""Pause of clients when a process fails in the middle of their streams: a worker, a router, the controller, Ray's head.

    python -m benchmarks.kill decode|prefill [...] [--fault kill|stop|slow|hang|cut] [--launcher local|ray]
                                             [--engine fake|torch] [--rounds 2]
    python -m benchmarks.kill router [--fault kill|stop] ...
    python -m benchmarks.kill controller [--fault kill|stop] | head
    python -m benchmarks.kill router|controller [--fault kill|stop] --address HOST:1,HOST:2 --pid PID

Method. 2P+2D of the default model in fp32, so that texts can be compared; 1P+1D with --alone: a worker without another
of its kind keeps its answers until it is replaced. For a worker: one router and 8 sampled streams of 128 tokens, every
prompt handed over; for a prefill worker the prompts are seven times as long, so that it is reading when the fault
comes. For others: two routers and 16 streams, the even ones through router-0 and the odd ones through router-1, by
clients that know both. Seeds are fixed, and every round has prompts of its own. The fault comes once every stream has
its first tokens, for a prefill worker while it reads. The same requests are then sent again, undisturbed, and every
text must be the same.

Several workers (`prefill decode`, `decode decode`) are hurt in turn, each in the middle of streams of its own, and then
replaced at the same time, which saves time; not with `kill`, whose successors start at once. A pool that is named twice
has three workers. After `stop`, `hang` and `cut` the undisturbed streams run before the successors start, on the rest.

- `hang` (fake engine): a poison prompt, given up soon after its plan, hangs a step of one worker. All have measured
  their steps by then; before, a hang is distinguished from a compilation only after 10 minutes. For a decode worker
  there are no prefill workers, which would compute the prompt; 24 streams give every worker some.
- `slow`: the process runs one part in twenty of the time, under streams of 1,500 tokens (prefill: prompts that keep
  coming), with `slow_drain_s: 5` s, until it is kept out of use, and is then left alone until it is used again. With
  --brief: 500 tokens and 1 s, and it is killed once it is kept out.
- `cut`: all listeners of the worker, in both directions, in a network of this benchmark's own (root and `ip`), until
  its successor, which has other ports, serves. The worker's own calls to others are not cut.
- A controller that dies has a successor only in a Ray cluster that kvrelay joins: one is started for it. It is back
  when state.json says that it looks after everything. `stop`: for 3 s, in which a decode worker is killed; nothing but
  its continuation brings it back, and the time until the worker is replaced counts from there.
- `head`: Ray's main processes at the head, which cluster.ray.keep_head starts again; the controller and router-0 end
  with them, and workers and router-1, on another node, do not.

Reported: failed requests, texts that differ, the largest gap between two tokens of each stream whose router died, of
each other one and of the undisturbed ones, the largest TTFT, and the seconds from the fault until the worker's
successor is ready in the router, or until the router that failed answers again. All processes, the starting ones
included, share this machine's cores.

With --address an existing cluster is measured; then --pid, on this host, is the process to hurt: a router's, or for
`controller` the supervisor's or the controller's, whose death no client should see at all.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.answers import Answer, differences, read, story
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.faults import CannotInflict, Fault, PrivateNetwork
from benchmarks.figures import Figures, quantile
from benchmarks.hurt import WORKERS, Recovery, WorkerHurt
from benchmarks.hurt_others import ControllerHurt, hurt_router, hurt_stranger
from benchmarks.kill_targets import Plan, Target, target_of
from cluster.processes.life import LONG_LIFE_S
from cluster.processes.state import StateFile
from kvrelay.client import AsyncClient, Token
from worker.step_watch import HUNG_S

NUM_BEGUN = 5
"""Tokens of every stream before the fault."""
NUM_REPEATS = {"prefill": 40}
"""Length of the prompts by victim, in sentences."""
_QUIET_AT_FIRST = (Fault.STOP, Fault.HANG, Fault.CUT)
"""Faults of workers whose successors start seconds later."""
_LIVES_S = {Fault.KILL: LONG_LIFE_S} | dict.fromkeys(_QUIET_AT_FIRST, LONG_LIFE_S - HUNG_S)
"""Time before a fault: a process that dies sooner than `LONG_LIFE_S` after its start comes back later and later. The
quiet faults end it after `HUNG_S`."""
_SIGNALS = (Fault.KILL, Fault.STOP)

Hurt = Callable[[Sequence[asyncio.Event]], Awaitable[Recovery]]
"""Hurts the victim, given the events of all streams, which are set when a stream has its first tokens or has failed."""


async def _pass(target: Target, victim: str, number: int, hurt: Hurt | None) -> tuple[list[Answer], Recovery | None]:
    """Send the streams of a round, in turn through each router; returns the answers, and what `hurt` returns."""
    plan, addresses = target.plan, target.addresses
    first, begun = number * plan.num_streams, [asyncio.Event() for _ in range(plan.num_streams)]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient([*addresses[at:], *addresses[:at]], timeout_s=600, tls=target.tls)
            )
            for at in range(len(addresses))
        ]
        asking = [
            asyncio.create_task(_ask(clients[idx % len(clients)], plan, victim, first + idx, event))
            for idx, event in enumerate(begun)
        ]
        recovery = None if hurt is None else await hurt(begun)
        return await asyncio.gather(*asking), recovery


async def _ask(client: AsyncClient, plan: Plan, victim: str, number: int, begun: asyncio.Event) -> Answer:
    def on_token(token: Token) -> None:
        if token.token_index + 1 >= NUM_BEGUN:
            begun.set()

    num_repeats = NUM_REPEATS.get(victim, 6)
    stream = story(client, number, num_tokens=plan.num_tokens(victim), num_repeats=num_repeats)
    answer = await read(stream, on_token=on_token)
    begun.set()
    return answer


def _hurts(target: Target, client: AsyncClient) -> dict[str, Hurt]:
    """Return how each victim is hurt; `client` reaches a router that is not."""
    plan = target.plan
    (victim, *_), fault, ask = plan.victims, plan.fault, partial(target.client, target.addresses[0], max_attempts=1)
    if target.pid is not None:
        pid = target.pid
        return {victim: lambda begun: hurt_stranger(begun, pid, fault)}
    assert target.run_dir is not None, "a cluster of our own has a folder"
    if plan.hurts_workers:
        return {
            each: WorkerHurt(client, each, fault, target.network, is_brief=plan.is_brief).inflict
            for each in plan.victims
        }
    run_dir, controller = target.run_dir, ControllerHurt(target.run_dir, client)
    if victim == "router":
        return {victim: lambda begun: hurt_router(begun, _router_pid(run_dir), fault, ask)}
    if target.head is not None:
        kill = target.head.kill
        return {victim: lambda begun: controller.lose_head(begun, kill, ask)}
    return {victim: controller.stop if fault is Fault.STOP else controller.kill}


async def measure(target: Target, figures: Figures, *, num_rounds: int, console: Console) -> bool:
    """Run the rounds; returns whether nothing failed and no text differs."""
    plan, is_clean, number = target.plan, True, 0
    await _pass(target, plan.victims[0], 10_000, None)  # warms up
    async with target.client(target.addresses[-1]) as client:
        hurts = _hurts(target, client)
        left = Counter(dict.fromkeys(plan.victims, num_rounds))
        while left.total():
            victims = [victim for victim in plan.victims if left[victim] > 0]
            ill: list[tuple[str, int, list[Answer], Recovery]] = []
            for victim in dict.fromkeys(victims):
                await _prepare(hurts[victim])
            for victim in victims:
                if not left[victim]:
                    continue
                left[victim] -= 1
                number += 1
                if target.run_dir is not None:
                    await asyncio.sleep(_LIVES_S.get(plan.fault, 0.0))
                answers, recovery = await _pass(target, victim, number, hurts[victim])
                assert recovery is not None, "it was hurt"
                ill.append((victim, number, answers, recovery))
                if plan.fault not in _QUIET_AT_FIRST or not plan.hurts_workers:
                    await recovery
            for victim, at, answers, recovery in ill:
                calm, _ = await _pass(target, victim, at, None)
                times = await recovery if len(ill) == 1 else {}
                is_clean = _tell(target, victim, (answers, calm), times, figures, console) and is_clean
            if len(ill) > 1:
                for victim, _, _, recovery in ill:
                    figures.add("back", plan.case(victim), victim, **await recovery)
    return is_clean


async def _prepare(hurt: Hurt) -> None:
    owner = getattr(hurt, "__self__", None)
    if isinstance(owner, WorkerHurt):
        await owner.prepare()


def _tell(
    target: Target,
    victim: str,
    passes: tuple[list[Answer], list[Answer]],
    times: dict[str, float],
    figures: Figures,
    console: Console,
) -> bool:
    """Add a round to the figures; returns whether it is clean. `passes`: hurt, and undisturbed."""
    hurt, calm = passes
    failures, num_different = differences(hurt, calm)
    case = target.plan.case(victim)
    console.print(f"{case}: {len(hurt)} streams, {len(failures)} failed, {num_different} texts differ; {times}")
    for failure in failures:
        console.print(failure)
    num_routers = len(target.addresses)
    groups = {f"clients of router-{at}": hurt[at::num_routers] for at in range(num_routers)}
    for arm, answers in (groups | {"undisturbed": calm}).items():
        _add(figures, case, arm, answers)
    figures.add("texts", case, victim, failed=len(failures), differ=num_different)
    if times:
        figures.add("back", case, victim, **times)
    return not failures and not num_different


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


def _router_pid(run_dir: Path) -> int:
    state = StateFile(run_dir).read()
    assert state is not None, "a cluster that runs has a state"
    router = next(process for process in state.processes if process.name == "router-0").identity
    assert router is not None, "the first router runs on this host"
    return router.pid


def main() -> None:
    """Run the benchmark."""
    parser = command_line("kill", __doc__, rounds=2, has_launcher=True)
    kinds = [*WORKERS, "router", "controller", "head"]
    parser.add_argument("victims", nargs="+", choices=kinds, metavar="|".join(kinds), help="what is hurt")
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch", help="the default model, or none")
    parser.add_argument("--fault", choices=[*Fault], default=Fault.KILL, help="what happens to it (default: kill)")
    parser.add_argument("--alone", action="store_true", help="one worker in each pool")
    parser.add_argument("--brief", action="store_true", help="slow workers are not followed to the end")
    parser.add_argument("--address", help="routers of a running cluster, separated by a comma; one round is measured")
    parser.add_argument("--pid", type=int, help="the process to hurt, with --address")
    args = parser.parse_args()
    plan = Plan(
        victims=tuple(args.victims),
        fault=Fault(args.fault),
        launcher=args.launcher,
        engine=args.engine,
        is_alone=args.alone,
        is_brief=args.brief,
    )
    if (args.address is None) != (args.pid is None):
        parser.error("--address and --pid go together")
    if len(plan.victims) > 1 and not {*plan.victims} <= {*WORKERS}:
        parser.error("only workers are hurt together")
    if plan.fault not in _SIGNALS and (not plan.hurts_workers or args.address is not None):
        parser.error(f"--fault {plan.fault} is for the workers of a cluster that is started for it")
    if plan.victims == ("head",) and plan.fault is not Fault.KILL:
        parser.error("a head is killed")
    if plan.fault is Fault.HANG and (plan.engine != "fake" or len({*plan.victims}) > 1):
        parser.error("--fault hang needs --engine fake and workers of one pool")
    console, figures = terminal(), Figures()
    if args.address is not None:
        stranger = Target(plan=plan, addresses=tuple(args.address.split(",")), pid=args.pid)
        is_clean = asyncio.run(measure(stranger, figures, num_rounds=1, console=console))
    else:
        try:
            network = PrivateNetwork() if plan.fault is Fault.CUT else None
        except CannotInflict as error:
            raise SystemExit(f"cannot cut a worker off: {error}") from error
        with target_of(plan, console, network=network) as target:
            is_clean = asyncio.run(measure(target, figures, num_rounds=args.rounds, console=console))
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/kill.py")
    if not is_clean:
        raise SystemExit("requests failed, or texts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
