"""Recurrent layers on the compiled kernels."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.ops.cpu.library import Convolution, CpuKernels, Delta, Features, States
from engine.ops.recurrent import StepStates
from engine.weights.decoder_weights import RecurrentWeights
from engine.weights.delta import DeltaConfig
from engine.weights.recurrent import RecurrentConfig

_DIM_MULTIPLE = 16
_FEATURES = ("query", "key", "value", "gate", "rate", "decay")


def can_recur(config: RecurrentConfig | None) -> bool:
    """Whether the kernels take recurrent layers like these, or there are none."""
    if config is None:
        return True
    return isinstance(config, DeltaConfig) and not any(d % _DIM_MULTIPLE for d in (config.key_dim, config.value_dim))


class CpuRecurrence:
    """The recurrent layers of a model."""

    def __init__(self, config: RecurrentConfig, kernels: CpuKernels) -> None:
        """Take layers that the kernels take."""
        assert isinstance(config, DeltaConfig), f"no kernel computes {config}"
        self._config = config
        self._kernels = kernels
        self._layer = Delta(
            convolution=Convolution(channels=config.num_channels, taps=config.kernel_size),
            num_key_heads=config.num_key_heads,
            num_heads=config.num_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            row_size=sum(rows for _name, rows in config.inputs),
        )
        for name in _FEATURES:
            at = getattr(config.features, name)
            setattr(self._layer, name, Features(begin=at.begin, stride=at.stride))

    def run(
        self, states: StepStates, step: Any, layer_idx: int, projected: Tensor, weights: RecurrentWeights
    ) -> Tensor:
        """Return what `RecurrentStepOps.recur` does; `step` is its address for kernels."""
        layer, config = self._layer, self._config
        layer.convolution.weights = weights.convolution.data_ptr()
        layer.step_bias, layer.log_decay = weights.step_bias.data_ptr(), weights.log_decay.data_ptr()
        layer.norm = weights.norm.data_ptr()
        pages = States(
            pages=states.pages(layer_idx).data_ptr(),
            sources=states.sources.data_ptr(),
            targets=states.targets.data_ptr(),
            size=config.state_size,
        )
        results = torch.empty((len(projected), config.output_size), dtype=projected.dtype)
        addresses = (ctypes.byref(pages), ctypes.byref(layer), projected.data_ptr(), results.data_ptr())
        self._kernels.run_delta(step, *addresses)
        return results
