"""Measures what memory and matrix products of a device give to one process, for the floors of a model's steps.

On a shared host both change from minute to minute, memory by a factor of two: a rate holds for the moment in which it
was measured.
"""

import time
from collections.abc import Callable

import torch

from engine.kv_store import KvShape
from engine.weights.config import DecoderConfig
from engine.weights.layout import layer_projections
from engine.weights.precision import cpu_has_bfloat16
from engine.work import DeviceRates, ModelShape, StepFloors

_MATMUL_SIZES = (256, 1024, 2048)
_NUM_RUNS = 4
_CUDA_REPEATS = 32
"""Operations of a run on a GPU: one alone takes no longer than its launch."""
_LONG_S = 0.1
"""Longest product that is tried, as the smaller ones predict it: beyond it, their rate is that of larger ones, too."""
_READ_BYTES_AT_START, _CUDA_READ_BYTES_AT_START = 1 << 27, 1 << 29
"""Several times the last cache, which on a GPU has 50 MiB (Hopper) or 126 MiB (Blackwell)."""


def model_shape(config: DecoderConfig) -> ModelShape:
    """Return what the arithmetic of a decoder is counted from, in bfloat16."""
    latent, recurrent = config.latent, config.recurrent
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim if latent is None else (latent.query_dim + latent.value_dim) // 2,
        intermediate_size=sum(map(config.multiplied_size, range(config.num_layers))) // config.num_layers,
        vocab_size=config.vocab_size,
        latent_row_size=None if latent is None else latent.row_size,
        attention_weights=_weights_before_mlp(config, is_recurrent=False),
        num_recurrent_layers=0 if recurrent is None else len(recurrent.layers),
        recurrent_weights=0 if recurrent is None else _weights_before_mlp(config, is_recurrent=True),
    )


def _weights_before_mlp(config: DecoderConfig, *, is_recurrent: bool) -> int:
    """Return the number of weights of one layer's attention or recurrence."""
    fields, latent = ("qkv", "query_up", "output"), config.latent
    kinds = (config.recurrent_of(layer_idx) is not None for layer_idx in range(config.num_layers))
    layer_idx = list(kinds).index(is_recurrent)
    found = (each for each in layer_projections(config, layer_idx) if each.field in fields)
    products = sum(sum(each.rows) * each.in_features for each in found)
    return (
        products if latent is None else products + config.num_heads * (latent.nope_dim + latent.value_dim) * latent.rank
    )


def measure_floors(
    config: DecoderConfig, kv: KvShape, *, weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> StepFloors:
    """Measure the device, in some tenths of a second, and return the least times of the model's steps on it.

    `dtype` is that of the model's products.
    """
    read_bytes = _CUDA_READ_BYTES_AT_START if device.type == "cuda" else _READ_BYTES_AT_START
    return StepFloors(
        model=model_shape(config),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv.bytes_per_token,
        rates=RateMeter(dtype=dtype, device=device, read_bytes=read_bytes).measure(),
    )


class RateMeter:
    """Measures a device; one instance keeps the large tensor."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        read_bytes: int = 1 << 30,
    ) -> None:
        """Allocate `read_bytes` on the device, by default the CPU: many times its caches.

        Products are of `dtype`; of float32 on a CPU without products of bfloat16, which widens these.
        """
        self._device = device or torch.device("cpu")
        is_widened = self._device.type == "cpu" and dtype is torch.bfloat16 and not cpu_has_bfloat16()
        self._dtype = torch.float32 if is_widened else dtype
        self._read_bytes = read_bytes
        self._numbers = torch.ones(read_bytes // 4, device=self._device)

    def measure(self) -> DeviceRates:
        """Return what the device does at this moment with this process's threads: some tenths of a second."""
        flops_per_s = 0.0
        for size in _MATMUL_SIZES:
            flops = 2 * size**3
            if flops > _LONG_S * flops_per_s > 0:
                break
            flops_per_s = max(flops_per_s, flops / self._matmul_s(size))
        return DeviceRates(
            read_bytes_per_s=self._read_bytes / self._least_s(self._numbers.sum),
            flops_per_s=flops_per_s,
            num_cores=torch.get_num_threads() if self._device.type == "cpu" else 0,
        )

    def _matmul_s(self, size: int) -> float:
        matrix = torch.randn(size, size, device=self._device).to(self._dtype)
        return self._least_s(lambda: matrix @ matrix)

    def _least_s(self, run: Callable[[], object]) -> float:
        """Return the least wall time of several runs, waiting for the device."""
        return min(self._timed_s(run) for _ in range(_NUM_RUNS))

    def _timed_s(self, run: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            started_s = time.perf_counter()
            run()
            return time.perf_counter() - started_s
        torch.cuda.synchronize(self._device)
        started_s = time.perf_counter()
        for _ in range(_CUDA_REPEATS):
            run()
        torch.cuda.synchronize(self._device)
        return (time.perf_counter() - started_s) / _CUDA_REPEATS
