"""Requests per second against transformers' own continuous batching, same weights, same card, alternating.

    python -m benchmarks.cuda.throughput [--model qwen3-8b] [--device cuda] [--out DIR] [--smoke]

Method. 256 requests of 512 random prompt tokens and 256 greedy tokens each, no end-of-sequence token, all at once. Both
arms hold the same random bf16 weights in one process; while one computes, the other sleeps. Ours: the engine loop of a
worker. Theirs: `generate_batch` with its manager kept between rounds and warmed up, flash attention where that is
installed (the note tells), its own choice of graphs and of batch sizes, and most of the memory that is left. A few
requests warm an arm up. A round of ours is reported before theirs is loaded, whose failure loses nothing; then the arms
alternate as long as the time budget lasts, each at least once. Output tokens per second; medians, and their ratio.
"""

import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, EngineArm, Format, largest_model, transformers_model
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading
from benchmarks.cuda.timing import synchronize
from common.random_models import CONFIGS

_GOAL = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of both arms."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    peer_limits: Mapping[str, Any]
    """Settings that transformers would otherwise choose by itself."""

    @property
    def num_generated(self) -> int:
        """Tokens of a whole round."""
        return self.num_requests * self.num_output_tokens


# Share of the memory that our engine and both copies of the weights leave; the rest is for what its attention gathers.
_PEER_MEMORY = {"max_memory_percent": 0.7}
FULL = Load(num_requests=256, num_prompt_tokens=512, num_output_tokens=256, peer_limits=_PEER_MEMORY)
SMOKE = Load(
    num_requests=4,
    num_prompt_tokens=24,
    num_output_tokens=6,
    peer_limits={"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64},
)
_ROUNDS = ("transformers", "transformers", "kvrelay", "kvrelay") * 2
"""Rounds after the first one, which is ours."""

Prompts = list[list[int]]


class OurArm:
    """A worker's engine."""

    def __init__(self, arm: Arm, load: Load, device: torch.device) -> None:
        blocks_per_request = -(-(load.num_prompt_tokens + load.num_output_tokens) // BLOCK_SIZE) + 1
        config = arm.serving_config(
            device,
            num_blocks=int(load.num_requests * blocks_per_request * 1.05) + 16,
            max_running=load.num_requests,
            max_waiting=load.num_requests,
            max_step_tokens=max(8192, load.num_requests),
        )
        self.engine = EngineArm(config)
        self._load = load

    def run(self, prompts: Prompts) -> int:
        """Answer all prompts; returns the number of tokens generated."""
        self.engine.num_tokens = 0
        for prompt in prompts:
            self.engine.add(prompt, max_tokens=self._load.num_output_tokens)
        self.engine.drain()
        return self.engine.num_tokens


def _known_settings(settings: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return settings of transformers 5.23 as an older release knows them."""
    renamed = {"page_size": "block_size"} if "page_size" not in known else {}
    named = {renamed.get(name, name): value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name in known or name != "auto_switch_to_flash"}


class TransformersArm:
    """transformers' continuous batching."""

    def __init__(self, arm: Arm, load: Load, device: torch.device) -> None:
        import transformers

        hugging_face: Any = transformers  # half of it has no types
        with device:
            self._model: Any = transformers_model(arm.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._load = load
        self._generation = hugging_face.GenerationConfig(
            do_sample=False, max_new_tokens=load.num_output_tokens, eos_token_id=-1, pad_token_id=0
        )
        config = hugging_face.ContinuousBatchingConfig
        settings = {
            "auto_switch_to_flash": _has_flash_attention(),
            "max_requests_per_batch": load.num_requests,  # else it takes the warm-up's
            "allow_block_sharing": False,  # no two prompts have a block in common
            **load.peer_limits,
        }
        self._batching = config(**_known_settings(settings, {field.name for field in dataclasses.fields(config)}))

    @property
    def attention(self) -> str:
        """The attention implementation that it chose."""
        return str(self._model.config._attn_implementation)  # noqa: SLF001 - transformers has no other name for it

    def run(self, prompts: Prompts) -> int:
        """Answer all prompts; returns the number of tokens generated."""
        outputs = self._model.generate_batch(
            inputs=prompts,
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            persistent_manager=True,
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    def close(self) -> None:
        """Free its pages."""
        self._model.destroy_cached_continuous_batching_manager()


def measure(part: Part, model: str) -> None:
    """Report our own round, then alternate the arms and report both."""
    load, arm = SMOKE if part.is_smoke else FULL, Arm(model=model, format=Format.BF16)
    ours = OurArm(arm, load, part.device)
    times: dict[str, list[float]] = {"kvrelay": [], "transformers": []}

    def round_of(name: str, run: Callable[[Prompts], int], *, is_warm_up: bool = False) -> None:
        prompts = [
            list(ours.engine.prompt(load.num_prompt_tokens)) for _ in range(4 if is_warm_up else load.num_requests)
        ]
        elapsed_s = _timed(run, prompts, load, part.device)
        print(f"  {name}: {'warmed up in ' if is_warm_up else ''}{elapsed_s:.2f} s", flush=True)
        if not is_warm_up:
            times[name].append(elapsed_s)

    round_of("kvrelay", ours.run, is_warm_up=True)
    round_of("kvrelay", ours.run)
    case = _case(arm, load)
    rate = load.num_generated / times["kvrelay"][0]
    part.add(Reading(case=f"{case}, alone", value=rate, unit="tokens/s", note="before the other arm is loaded"))
    peer = TransformersArm(arm, load, part.device)
    runs: dict[str, Callable[[Prompts], int]] = {"kvrelay": ours.run, "transformers": peer.run}
    try:
        round_of("transformers", peer.run, is_warm_up=True)
        for name in _ROUNDS[: 1 if part.is_smoke else None]:
            # A round that would end beyond the budget is not begun, but the first of each arm is.
            if not times[name] or time.monotonic() + 1.1 * max(times[name]) < part.deadline_s:
                round_of(name, runs[name])
    finally:
        peer.close()
    part.add(_reading(arm, load, times, attention=peer.attention))


def _case(arm: Arm, load: Load) -> str:
    return f"{arm.name}, {load.num_requests} x ({load.num_prompt_tokens} in, {load.num_output_tokens} out)"


def _reading(arm: Arm, load: Load, times: Mapping[str, list[float]], *, attention: str) -> Reading:
    rates = {name: load.num_generated / statistics.median(each) for name, each in times.items()}
    spread = "; ".join(
        f"{name} {len(each)} rounds, {load.num_generated / max(each):.0f}-{load.num_generated / min(each):.0f}"
        for name, each in times.items()
    )
    return Reading(
        case=_case(arm, load),
        value=rates["kvrelay"],
        unit="tokens/s",
        bound=rates["transformers"],
        ratio=rates["kvrelay"] / rates["transformers"],
        goal=_GOAL,
        note=f"bound: transformers with {attention} attention; {spread}",
    )


def _timed(run: Callable[[Prompts], int], prompts: Prompts, load: Load, device: torch.device) -> float:
    gc.collect()
    synchronize(device)
    started_s = time.perf_counter()
    num_tokens = run(prompts)
    synchronize(device)
    elapsed_s = time.perf_counter() - started_s
    if num_tokens != len(prompts) * load.num_output_tokens:
        raise AssertionError(f"{num_tokens} of {len(prompts) * load.num_output_tokens} tokens were generated")
    return elapsed_s


def _has_flash_attention() -> bool:
    """Whether transformers finds flash attention installed; kernels from a hub do not count, it may be out of reach."""
    import transformers.utils.import_utils as found

    return bool(found.is_flash_attn_2_available() or found.is_flash_attn_3_available())


def _default_model(device: torch.device) -> str:
    """Return the larger model where both arms fit and transformers has flash attention.

    Without, it attends from every new token to all keys of the batch and masks most of them: on the larger model a
    round would take minutes.
    """
    model = largest_model(device)
    return model if model != "qwen3-8b" or _has_flash_attention() else "qwen3-0.6b"


def main(argv: list[str] | None = None) -> int:
    """Compare; returns the exit status."""
    parser = part_parser("throughput", __doc__)
    parser.add_argument("--model", choices=list(CONFIGS), help="a random model's name; default: what fits")
    args = parser.parse_args(argv)
    title = "Throughput against transformers' continuous batching"
    return run_part("throughput", title, args, lambda part: measure(part, args.model or _default_model(part.device)))


if __name__ == "__main__":
    sys.exit(main())
