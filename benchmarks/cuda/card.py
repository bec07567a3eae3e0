"""Rates of the card, measured in the same run: the bounds of every other part.

    python -m benchmarks.cuda.card [--device cuda] [--out DIR] [--smoke]

Method. Copy: one tensor of 4 GiB over another, bytes read plus bytes written per second. Matrix product: 8192 x 8192
by 8192 x 8192, in bfloat16 and in fp8 (e4m3, one scale per matrix), 50 in a row so that clocks settle. Medians.
"""

import json
import sys
from dataclasses import asdict, dataclass

import torch

from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading
from benchmarks.cuda.timing import median_s

_FILE = "card_rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRates:
    """A card's speeds, measured."""

    copy_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    """None where the device multiplies no 8-bit floats."""


def measure_copy(device: torch.device, num_bytes: int) -> float:
    """Return bytes read plus written per second of a device-to-device copy."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device, repetitions=20)


def measure_matmul(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return operations per second of a square matrix product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype is torch.float8_e4m3fn:
        one = torch.ones((), device=device)

        def run() -> torch.Tensor:
            return torch._scaled_mm(  # noqa: SLF001 - torch's only fp8 product
                left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
    else:

        def run() -> torch.Tensor:
            return left @ right.t()

    return 2 * size**3 / median_s(run, device, repetitions=50, warm_up=10)


def load_rates(part: Part) -> CardRates:
    """Return the rates that an earlier part of this run measured, else measure them now."""
    path = part.out / _FILE
    if path.is_file():
        return CardRates(**json.loads(path.read_text(encoding="utf-8")))
    return _measure_rates(part)


def _measure_rates(part: Part) -> CardRates:
    num_bytes, size = (1 << 20, 64) if part.is_smoke else (4 << 30, 8192)
    try:
        fp8_flops = measure_matmul(part.device, size, torch.float8_e4m3fn)
    except RuntimeError:
        fp8_flops = None
    rates = CardRates(
        copy_bytes_per_s=measure_copy(part.device, num_bytes),
        bf16_flops=measure_matmul(part.device, size, torch.bfloat16),
        fp8_flops=fp8_flops,
    )
    part.out.mkdir(parents=True, exist_ok=True)
    (part.out / _FILE).write_text(json.dumps(asdict(rates)) + "\n", encoding="utf-8")
    return rates


def _measure(part: Part) -> None:
    rates = _measure_rates(part)
    part.add(Reading(case="copy, read + written", value=rates.copy_bytes_per_s / 1e9, unit="GB/s"))
    part.add(Reading(case="matrix product, bf16", value=rates.bf16_flops / 1e12, unit="TFLOP/s"))
    if rates.fp8_flops is not None:
        part.add(Reading(case="matrix product, fp8", value=rates.fp8_flops / 1e12, unit="TFLOP/s"))


def main(argv: list[str] | None = None) -> int:
    """Measure the card; returns the exit status."""
    return run_part(
        "card", "What the card measures for itself", part_parser("card", __doc__).parse_args(argv), _measure
    )


if __name__ == "__main__":
    sys.exit(main())
