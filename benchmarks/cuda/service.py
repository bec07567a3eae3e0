"""The whole service on one card: router, prefill worker and decode worker as processes, without Ray.

    python -m benchmarks.cuda.service [--model qwen3-8b] [--device cuda] [--out DIR] [--smoke]

Method. `launcher: local` starts the cluster; both workers hold their own random bf16 weights and pages on the same
card. Requests go over gRPC; every prompt is new, so that its KV is computed by one worker and handed to the other. One
request at a time, then 16 at once. Reported: time to the first token and between tokens as the router measures them,
and the handoff, which must go by CUDA IPC: how long it took, and how much of that prefill did not hide. There is no
bound to hold these against; they show where a request's time goes. On a CPU, shared memory takes the place of CUDA IPC.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, Format, largest_model
from benchmarks.cuda.part import Part, exit_when_terminated, part_parser, run_part
from benchmarks.cuda.report import Reading
from cluster import lifecycle
from common.config import ServingConfig
from common.random_models import CONFIGS
from kvrelay.client import AsyncClient, Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Requests that are sent."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_sequential: int
    num_concurrent: int


FULL = Sizes(num_prompt_tokens=2048, num_output_tokens=128, num_sequential=4, num_concurrent=16)
SMOKE = Sizes(num_prompt_tokens=96, num_output_tokens=8, num_sequential=2, num_concurrent=3)


def measure(part: Part, model: str) -> None:
    """Start a cluster, ask it, stop it."""
    sizes, arm = SMOKE if part.is_smoke else FULL, Arm(model=model, format=Format.BF16)
    blocks_per_request = -(-(sizes.num_prompt_tokens + sizes.num_output_tokens) // BLOCK_SIZE) + 1
    config = arm.serving_config(
        part.device,
        num_blocks=2 * sizes.num_concurrent * blocks_per_request,
        max_running=64,
        max_step_tokens=max(128, 2 * sizes.num_prompt_tokens),
    )
    started_s = time.monotonic()
    with _running(config) as address:
        print(f"  {arm.name}: serves after {time.monotonic() - started_s:.1f} s", flush=True)
        asyncio.run(_ask(part, arm, sizes, address))


@contextmanager
def _running(config: ServingConfig) -> Iterator[str]:
    """Run a cluster in a folder of its own; yields its address. Its logs are shown when it does not start."""
    config = config.model_copy(
        update={
            "name": "benchmark-cuda",
            "launcher": "local",
            "router": config.router.model_copy(
                update={"port": 0, "metrics_port": None, "local_prefill_max_tokens": 0}  # every prompt is handed over
            ),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir, config_path = Path(folder) / "run", Path("serving.yaml")
        try:
            with lifecycle.running_cluster(
                config, config_path=config_path, run_dir=run_dir, report=lambda line: print(f"  {line}")
            ) as info:
                yield info.address
        except lifecycle.ClusterError:
            for log in sorted(run_dir.glob("logs/*.log")):
                print(f"---- {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}", flush=True)
            raise


async def _ask(part: Part, arm: Arm, sizes: Sizes, address: str) -> None:
    rng = random.Random(3)
    vocab_size = arm.decoder.vocab_size

    async with AsyncClient(address, timeout_s=120) as client:

        async def one() -> Generation:
            prompt = [rng.randrange(vocab_size) for _ in range(sizes.num_prompt_tokens)]
            stream = client.stream(prompt, temperature=0, max_tokens=sizes.num_output_tokens, ignore_eos=True)
            return await stream.result()

        for _ in range(2):
            await one()  # first use of everything
        alone = [await one() for _ in range(sizes.num_sequential)]
        started_s = time.perf_counter()
        together = await asyncio.gather(*(one() for _ in range(sizes.num_concurrent)))
        elapsed_s = time.perf_counter() - started_s
    for case, answers in ((f"{arm.name}, 1 request", alone), (f"{arm.name}, {sizes.num_concurrent} at once", together)):
        _report(part, f"{case}, {sizes.num_prompt_tokens} in", answers)
    num_tokens = sizes.num_concurrent * sizes.num_output_tokens
    part.add(Reading(case=f"{arm.name}, {sizes.num_concurrent} at once", value=num_tokens / elapsed_s, unit="tokens/s"))
    with part.case("transport"):
        _check_transport(part, [*alone, *together])


def _report(part: Part, case: str, answers: Sequence[Generation]) -> None:
    timings = [answer.timings for answer in answers]
    moved = [answer.transfer for answer in answers if answer.transfer.transfer_s > 0]

    def add(name: str, values_s: Sequence[float], note: str) -> None:
        part.add(Reading(case=f"{case}, {name}", value=_median_ms(values_s), unit="ms", note=note))

    prefill_ms = _median_ms([each.prefill_s for each in timings])
    add("first token", [each.ttft_s for each in timings], f"prefill {prefill_ms:.1f} ms")
    largest_ms = 1000 * max(each.max_itl_s or 0.0 for each in timings)
    add("between tokens", [each.tpot_s or 0.0 for each in timings], f"largest gap {largest_ms:.1f} ms")
    if moved:
        exposed_ms = _median_ms([each.exposed_s for each in moved])
        note = f"{moved[0].kv_bytes / 1e6:.0f} MB by {moved[0].transport}, not hidden {exposed_ms:.1f} ms"
        add("handoff", [each.transfer_s for each in moved], note)


def _median_ms(values_s: Sequence[float]) -> float:
    return 1000 * statistics.median(values_s)


def _check_transport(part: Part, answers: Sequence[Generation]) -> None:
    expected = "cuda_ipc" if part.device.type == "cuda" else "shm"
    used = sorted({answer.transfer.transport or "none" for answer in answers})
    if used != [expected]:
        raise AssertionError(f"KV went by {', '.join(used)}, not by {expected}")


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = part_parser("service", __doc__)
    parser.add_argument("--model", choices=list(CONFIGS), help="a random model's name; default: what fits twice")
    args = parser.parse_args(argv)
    title = "The whole service on one card"
    return run_part("service", title, args, lambda part: measure(part, args.model or largest_model(part.device)))


if __name__ == "__main__":
    exit_when_terminated()
    sys.exit(main())
