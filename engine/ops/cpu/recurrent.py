"""Recurrent layers on the compiled kernels."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.ops.cpu.library import Convolution, CpuKernels, Delta, Features, Mamba, MambaScratch, States
from engine.ops.recurrent import StepStates
from engine.weights.decoder_weights import RecurrentWeights
from engine.weights.delta import DeltaConfig
from engine.weights.mamba import MambaConfig
from engine.weights.recurrent import RecurrentConfig

_DIM_MULTIPLE = 16
_FEATURES = ("query", "key", "value", "gate", "rate", "decay")


def can_recur(config: RecurrentConfig | None) -> bool:
    """Whether the kernels take recurrent layers like these, or there are none."""
    match config:
        case None:
            return True
        case DeltaConfig():
            dims = (config.key_dim, config.value_dim)
        case MambaConfig():
            dims = (config.head_dim, config.state_dim)
        case _:
            return False
    return not any(dim % _DIM_MULTIPLE for dim in dims)


class CpuRecurrence:
    """The recurrent layers of a model."""

    def __init__(self, config: RecurrentConfig, kernels: CpuKernels) -> None:
        """Take layers that the kernels take."""
        assert isinstance(config, DeltaConfig | MambaConfig), f"no kernel computes {config}"
        self._config = config
        self._kernels = kernels
        self._layer = _delta(config) if isinstance(config, DeltaConfig) else _mamba(config)

    def run(
        self, states: StepStates, step: Any, layer_idx: int, projected: Tensor, weights: RecurrentWeights
    ) -> Tensor:
        """Return what `RecurrentStepOps.recur` does; `step` is its address for kernels."""
        layer, config, kernels = self._layer, self._config, self._kernels
        layer.convolution.weights = weights.convolution.data_ptr()
        layer.convolution.bias = None if weights.convolution_bias is None else weights.convolution_bias.data_ptr()
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
        if isinstance(config, DeltaConfig):
            kernels.run_delta(step, *addresses)
            return results
        assert isinstance(layer, Mamba) and weights.skip is not None, f"{config} has factors that are missing"
        layer.skip = weights.skip.data_ptr()
        vectors, wide = (torch.empty(len(projected) * size) for size in (2 * config.group_size, config.output_size))
        scratch = MambaScratch(vectors=vectors.data_ptr(), results=wide.data_ptr())
        kernels.run_mamba(step, *addresses, ctypes.byref(scratch))
        return results


def _convolution(config: RecurrentConfig) -> Convolution:
    return Convolution(channels=config.num_channels, taps=config.kernel_size)


def _delta(config: DeltaConfig) -> Delta:
    layer = Delta(
        convolution=_convolution(config),
        num_key_heads=config.num_key_heads,
        num_heads=config.num_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        row_size=sum(rows for _name, rows in config.inputs),
    )
    for name in _FEATURES:
        at = getattr(config.features, name)
        setattr(layer, name, Features(begin=at.begin, stride=at.stride))
    return layer


def _mamba(config: MambaConfig) -> Mamba:
    least, most = config.time_step_limits
    return Mamba(
        convolution=_convolution(config),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_groups=config.num_groups,
        state_dim=config.state_dim,
        least_step=least,
        largest_step=most,
    )
