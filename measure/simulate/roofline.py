"""Step times on hardware that is not here, from arithmetic, memory traffic and the links between devices.

A step does three kinds of work in turn: products with weights, attention of prompt tokens, attention of decoding
sequences. Each takes the time of its arithmetic or of its memory traffic, whichever is longer (Williams et al.,
"Roofline", CACM 2009). All-reduces of tensor parallelism and a fixed overhead are added. Rates are peaks of the data
sheets times stated efficiencies, so absolute times are estimates; placement policies are judged by how times grow with
prompts, batches and contexts.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from scipy.optimize import nnls

from common.timing import LinkModel, StepModel, StepShape, TimingModel
from engine.work import ModelShape
from measure.simulate.timing import FittedTimes, KvSize, WorkerSpeed, read_timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A worker's hardware: one device, or a tensor-parallel group of equal ones."""

    peak_flops_per_s: float
    """Dense arithmetic of one device at the model's precision."""
    memory_bytes_per_s: float
    """Memory bandwidth of one device."""
    peer_bytes_per_s: float
    """Bandwidth of one device to the others of its group, in one direction."""
    nic_bytes_per_s: float
    """Bandwidth of one device to other workers."""
    tensor_parallel: int = 1
    flops_efficiency: float = 0.5
    """Share of the peak that large prefills reach end to end (model FLOP utilization)."""
    bandwidth_efficiency: float = 0.75
    """Share of the peak that streaming reads, all-reduces and transfers reach."""
    overhead_s: float = 2e-3
    """Fixed time of a step: host, launches, sampling, latency of all-reduces."""
    transfer_latency_s: float = 2e-3
    """Fixed time of a pull: one round trip and the set-up of its reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Step times of a model on a device."""

    model: ModelShape
    device: Device

    def step_s(self, shape: StepShape) -> float:
        """Return the time of one step."""
        return (
            self.device.overhead_s
            + self._products_s(shape)
            + self._prefill_attention_s(shape)
            + self._decode_attention_s(shape)
            + self._all_reduce_s(shape)
        )

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """Return (seconds of a step that decodes so many sequences of no context, seconds more per context token)."""
        per_token_s = self._longer_s(flops=0, num_bytes=self.model.kv_bytes_per_token)
        return self.step_s(StepShape(num_decodes=num_decodes)), per_token_s

    def floors(self) -> tuple[StepModel, ...]:
        """See `StepTimes`: products bound by arithmetic, and by reading the weights once a step."""
        model, device = self.model, self.device
        per_kv_s = self._longer_s(flops=0, num_bytes=model.kv_bytes_per_token)
        per_token_s = self._all_reduce_s(StepShape(num_decodes=1))
        layers_s, head_s = (
            self._arithmetic_s(2 * num_weights) for num_weights in (model.num_layer_weights, model.num_head_weights)
        )
        reading_weights = StepModel(
            constant_s=device.overhead_s + self._products_s(StepShape()),
            per_prefill_token_s=per_token_s,
            per_prefill_pair_s=self._arithmetic_s(model.flops_per_pair),
            per_decode_s=per_token_s + per_kv_s,
            per_context_token_s=per_kv_s,
        )
        arithmetic = replace(
            reading_weights,
            constant_s=device.overhead_s,
            per_prefill_token_s=per_token_s + layers_s,
            per_decode_s=per_token_s + per_kv_s + layers_s + head_s,
        )
        return arithmetic, reading_weights

    @property
    def link(self) -> LinkModel:
        """Link between two workers: every device of a group pulls its part through its own NIC."""
        device = self.device
        return LinkModel(
            latency_s=device.transfer_latency_s,
            bytes_per_s=device.nic_bytes_per_s * device.tensor_parallel * device.bandwidth_efficiency,
        )

    def linearized(self, *, max_step_tokens: int) -> TimingModel:
        """Return the linear model with the least relative error over the shapes that workers see.

        Workers would have fitted and reported it; policies know nothing more precise.
        """
        return TimingModel(
            prefill=self._fit(_prefill_shapes(max_step_tokens)),
            decode=self._fit(_decode_shapes()),
            max_step_tokens=max_step_tokens,
            links={None: self.link},
        )

    def _products_s(self, shape: StepShape) -> float:
        return self._longer_s(flops=self.model.product_flops(shape), num_bytes=self.model.weight_bytes)

    def _prefill_attention_s(self, shape: StepShape) -> float:
        # One read of keys and values serves a whole tile of queries, so only writes count.
        flops = shape.num_prefill_pairs * self.model.flops_per_pair
        return self._longer_s(flops=flops, num_bytes=shape.num_prefill_tokens * self.model.kv_bytes_per_token)

    def _decode_attention_s(self, shape: StepShape) -> float:
        # Bound by memory: fewer than a hundred heads share keys and values.
        num_tokens = shape.num_context_tokens + shape.num_decodes
        return self._longer_s(flops=0, num_bytes=num_tokens * self.model.kv_bytes_per_token)

    def _arithmetic_s(self, flops: float) -> float:
        device = self.device
        return flops / (device.peak_flops_per_s * device.tensor_parallel * device.flops_efficiency)

    def _longer_s(self, *, flops: float, num_bytes: float) -> float:
        device = self.device
        return max(
            self._arithmetic_s(flops),
            num_bytes / (device.memory_bytes_per_s * device.tensor_parallel * device.bandwidth_efficiency),
        )

    def _all_reduce_s(self, shape: StepShape) -> float:
        """Return the time of two all-reduces per layer; a ring moves 2 (n - 1) / n of the sums through each device."""
        model, device = self.model, self.device
        num_devices = device.tensor_parallel
        num_bytes = (shape.num_prefill_tokens + shape.num_decodes) * model.hidden_size * model.bytes_per_value
        moved = 2 * model.num_layers * num_bytes * 2 * (num_devices - 1) / num_devices
        return moved / (device.peer_bytes_per_s * device.bandwidth_efficiency)

    def _fit(self, shapes: list[StepShape]) -> StepModel:
        """Return the model with non-negative weights and the least relative error."""
        seconds = np.array([self.step_s(shape) for shape in shapes])
        columns = np.array(
            [(1, s.num_prefill_tokens, s.num_prefill_pairs, s.num_decodes, s.num_context_tokens) for s in shapes],
            dtype=np.float64,
        )
        scale = np.maximum(columns.max(axis=0), 1)
        weights, _ = nnls(columns / scale / seconds[:, None], np.ones(len(shapes)))
        constant, per_token, per_pair, per_decode, per_context = (float(weight) for weight in weights / scale)
        return StepModel(
            constant_s=constant,
            per_prefill_token_s=per_token,
            per_prefill_pair_s=per_pair,
            per_decode_s=per_decode,
            per_context_token_s=per_context,
            num_samples=len(shapes),
        )

    @classmethod
    def preset(cls, model: str, device: str) -> Self:
        """Return the roofline of a known model on a known device. Raises UnknownHardware."""
        for key, name, known in (("model", model, MODELS), ("device", device, DEVICES)):
            if name not in known:
                raise UnknownHardware(f"{key}: {name!r} is not known; say one of {', '.join(known)}")
        return cls(model=MODELS[model], device=DEVICES[device])


class UnknownHardware(Exception):
    """A model or device is not known; the message names the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware of simulated workers: a roofline, or timings fitted on real workers."""

    model: str = "llama-70b"
    device: str = "h100-tp4"
    timing_file: Path | None = None
    """Timings in place of `model` and `device`."""

    def pace(self, max_step_tokens: int) -> tuple[WorkerSpeed, LinkModel, KvSize]:
        """Return speed, link and size of KV of workers with a step budget.

        Raises UnknownHardware, TimingFileError, OSError.
        """
        if self.timing_file is not None:
            fitted, kv = read_timing(self.timing_file)
            timing = replace(fitted, max_step_tokens=max_step_tokens)
            return WorkerSpeed(times=FittedTimes(timing), timing=timing), timing.links[None], kv
        roofline = Roofline.preset(self.model, self.device)
        timing = roofline.linearized(max_step_tokens=max_step_tokens)
        kv = KvSize(bytes_per_token=roofline.model.kv_bytes_per_token)
        return WorkerSpeed(times=roofline, timing=timing), roofline.link, kv


def _prefill_shapes(max_step_tokens: int) -> list[StepShape]:
    """Return chunks of prompts at several depths, alone and beside decoding sequences."""
    return [
        StepShape(
            num_prefill_tokens=num_tokens,
            num_prefill_pairs=num_tokens * depth + num_tokens * (num_tokens + 1) // 2,
            num_decodes=num_decodes,
            num_context_tokens=num_decodes * context,
        )
        for num_tokens in sorted({max(1, max_step_tokens * part // 8) for part in (1, 2, 4, 6, 8)})
        for depth in (0, 4_096, 16_384, 65_536)
        for num_decodes, context in ((0, 0), (8, 4_096), (32, 4_096), (32, 16_384))
    ]


def _decode_shapes() -> list[StepShape]:
    return [
        StepShape(num_decodes=num_decodes, num_context_tokens=num_decodes * context)
        for num_decodes in (1, 2, 4, 8, 16, 32, 64, 128)
        for context in (256, 2_048, 8_192, 32_768)
    ]


MODELS = {
    # Llama 3.1 70B and Qwen3 8B as in their config.json.
    "llama-70b": ModelShape(
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28_672,
        vocab_size=128_256,
    ),
    "qwen3-8b": ModelShape(
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        vocab_size=151_936,
    ),
}

# H100 SXM and H200 data sheets: 989 TFLOP/s bf16 dense (1979 with sparsity), 3.35 and 4.8 TB/s HBM, NVLink 900 GB/s in
# both directions together. One ConnectX-7 per device: 400 Gb/s.
_H100 = Device(peak_flops_per_s=989e12, memory_bytes_per_s=3.35e12, peer_bytes_per_s=450e9, nic_bytes_per_s=50e9)
_H100_TP4 = replace(_H100, tensor_parallel=4, overhead_s=3e-3)
_H200_TP4 = replace(_H100_TP4, memory_bytes_per_s=4.8e12)
DEVICES = {"h100": _H100, "h100-tp4": _H100_TP4, "h200-tp4": _H200_TP4}
