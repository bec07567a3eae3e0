"""Mixtures of experts in place of MLPs: what config.json says of them."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from engine.weights.architectures import ExpertKeys, MlpNames, SharedKeys
from engine.weights.config_json import MAX_LAYERS, MAX_SIZE, UnsupportedModel, count, positive

_MAX_EXPERTS = 4096
_SCORES = ("softmax", "sigmoid")
# Ways of choosing (`topk_method`), with the experts of a group whose scores add up to the group's; 0: without groups.
_GROUP_BEST = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
_BIASED_CHOICE = "noaux_tc"
_DEFAULT_STEEPNESS, _DEFAULT_LIMIT = 1.702, 7.0  # of a clamped gate


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert that every token goes through, beside those chosen."""

    size: int
    module: str
    """Name in a checkpoint, below the mixture's."""
    gate: str | None
    """Name of the router's row whose sigmoid weighs it; None: its weight is 1."""
    beside: MlpNames | None = None
    """Names where a checkpoint has it beside the mixture; None: it is `module`, with projections as others have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """Activation (up + 1) * gate * sigmoid(steepness * gate) of bounded gate and up."""

    steepness: float
    limit: float
    """Most of gate, and of the magnitude of up."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExpertsConfig:
    """A token goes through the few experts that its router prefers."""

    num_experts: int
    num_chosen: int
    """Experts of a token."""
    intermediate_size: int
    """Size of one expert."""
    has_normalised_weights: bool
    """Whether the weights of a token's experts add up to 1, and not only those of all experts."""
    dense_layers: tuple[int, ...]
    """Layers that have an MLP."""
    module: str
    """Name in a checkpoint, below the layer's."""
    projections: tuple[str, ...]
    """Names of gate, where there is one, up and down, below an expert's."""
    shared: SharedExpert | None = None
    has_sigmoid_scores: bool = False
    """Whether an expert's score is the sigmoid of its logit, and not its part of a softmax."""
    has_score_bias: bool = False
    """Whether a bias is added to the scores for the choice, though not to the weights."""
    num_groups: int = 1
    """Groups of consecutive experts."""
    num_chosen_groups: int = 1
    """Groups that a token's experts are in: those whose best experts have the largest scores together."""
    num_group_best: int = 0
    """Experts of a group whose scores are added up to its own; 0: groups do not matter."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    router: str = "gate"
    """Name of the router in a checkpoint, below `module`."""
    has_bias: bool = False
    """Whether the router and the projections have a bias."""
    clamped_gate: ClampedGate | None = None
    """Activation; None: silu(gate) * up."""
    are_stacked: bool = False
    """Whether a checkpoint has one tensor for all experts of a layer (`engine.model.checkpoints.stacked_experts`)."""
    has_stacked_halves: bool = False
    """Whether such a tensor has all outputs of gate before those of up, which otherwise alternate."""
    has_weighted_inputs: bool = False
    """Whether an expert's weight multiplies its inputs, and not its results."""

    @property
    def shared_size(self) -> int:
        """Size of the shared expert; 0: there is none."""
        return 0 if self.shared is None else self.shared.size

    def __repr__(self) -> str:
        """Leave out what has its default, so that a field that a later version adds changes no fingerprint."""
        given = ((each, getattr(self, each.name)) for each in fields(self))
        parts = [f"{each.name}={value!r}" for each, value in given if each.default is MISSING or value != each.default]
        return f"{type(self).__name__}({', '.join(parts)})"


def parse_experts(raw: Mapping[str, Any], keys: ExpertKeys) -> ExpertsConfig | None:
    """Return the mixtures that a config.json describes; None: there are none. Raises UnsupportedModel."""
    key = next((key for key in keys.num_experts if key in raw), keys.num_experts[0])
    if keys.can_be_none and raw.get(key) == 0:
        return None
    num_experts, num_chosen = positive(raw, key, at_most=_MAX_EXPERTS), positive(raw, "num_experts_per_tok")
    choice = _one_of(_GROUP_BEST, raw, "topk_method", keys.default_choice)
    num_best = _GROUP_BEST[choice]
    num_groups, num_chosen_groups = _groups(raw, num_experts, num_best) if num_best else (1, 1)
    num_eligible = num_experts // num_groups * num_chosen_groups
    if num_chosen > num_eligible:
        raise UnsupportedModel(f"num_experts_per_tok: {num_chosen} is more than the {num_eligible} experts")
    size, normalises = positive(raw, keys.intermediate_size, at_most=MAX_SIZE), keys.has_normalised_weights
    if normalises is None:
        normalises = bool(raw.get("norm_topk_prob", keys.default_has_normalised_weights))
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        has_normalised_weights=normalises,
        dense_layers=_dense_layers(raw),
        module=keys.module,
        projections=keys.projections,
        shared=None if keys.shared is None else _shared(raw, keys.shared, size),
        has_sigmoid_scores=_one_of(_SCORES, raw, "scoring_func", keys.default_scores) == "sigmoid",
        has_score_bias=choice == _BIASED_CHOICE,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        num_group_best=num_best,
        scale=_scale(raw),
        router=keys.router,
        has_bias=keys.has_bias,
        clamped_gate=_clamped_gate(raw) if keys.has_clamped_gate else None,
        are_stacked=keys.are_stacked,
        has_stacked_halves=keys.has_stacked_halves,
        has_weighted_inputs=keys.has_weighted_inputs,
    )


def _clamped_gate(raw: Mapping[str, Any]) -> ClampedGate:
    return ClampedGate(
        steepness=float(raw.get("swiglu_alpha", _DEFAULT_STEEPNESS)),
        limit=float(raw.get("swiglu_limit", _DEFAULT_LIMIT)),
    )


def _one_of(known: Collection[str], raw: Mapping[str, Any], key: str, default: str) -> str:
    value = raw.get(key) or default
    if value not in known:
        raise UnsupportedModel(f"{key}: {value!r} is not supported; supported are {', '.join(known)}")
    return str(value)


def _scale(raw: Mapping[str, Any]) -> float:
    scale = raw.get("routed_scaling_factor") or 1.0
    if not isinstance(scale, int | float):
        raise UnsupportedModel(f"routed_scaling_factor: {scale!r} is not a number")
    return float(scale)


def _groups(raw: Mapping[str, Any], num_experts: int, num_best: int) -> tuple[int, int]:
    """Return the number of groups, and of those that a token's experts are in."""
    num_groups, num_chosen = (count(raw, key) or 1 for key in ("n_group", "topk_group"))
    if num_experts % num_groups or num_chosen > num_groups or num_experts // num_groups < num_best:
        raise UnsupportedModel(f"n_group: {num_groups} and topk_group: {num_chosen} do not fit {num_experts} experts")
    return num_groups, num_chosen


def _dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers, first = positive(raw, "num_hidden_layers", at_most=MAX_LAYERS), count(raw, "first_k_dense_replace")
    if raw.get("moe_layers") is not None:
        return tuple(sorted(set(range(num_layers)).difference(raw["moe_layers"])))
    frequency = count(raw, "moe_layer_freq") or 1
    step = count(raw, "decoder_sparse_step") or count(raw, "interleave_moe_layer_step") or 1
    dense = {i for i in range(num_layers) if i < first or (i + 1) % step or i % frequency}
    return tuple(sorted(dense | set(raw.get("mlp_only_layers") or ())))


def _shared(raw: Mapping[str, Any], keys: SharedKeys, expert_size: int) -> SharedExpert | None:
    size = count(raw, keys.size) * expert_size if keys.counts_experts else positive(raw, keys.size)
    if size > MAX_SIZE:
        raise UnsupportedModel(f"{keys.size}: {size} inputs of one expert are not supported, only up to {MAX_SIZE}")
    return SharedExpert(size=size, module=keys.module, gate=keys.gate, beside=keys.beside) if size else None
