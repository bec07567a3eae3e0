"""The architectures that our own decoder computes: what their config.json means, and the names in their checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Activation(Enum):
    """Function of an MLP's gate, by its name in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"
    """Square of ReLU."""

    @property
    def has_gate(self) -> bool:
        """Whether MLPs with this function have a gate."""
        return self is not Activation.RELU2


class Recurrence(Enum):
    """Kind of an architecture's recurrent layers."""

    DELTA = "gated delta nets"
    GROUPED_DELTA = "gated delta nets, with all products of a key head side by side"
    MAMBA = "Mamba-2"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpNames:
    """Names of an MLP in a checkpoint."""

    module: str = "mlp"
    """Name below the layer's."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Projections below the module: gate and up, one that has the rows of gate and then those of up, or, where there is
    no gate, up alone."""
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Names of an expert that every token goes through; see `SharedExpert`."""

    size: str
    """Key of config.json."""
    counts_experts: bool
    """Whether `size` is in sizes of other experts; there may be none then."""
    module: str = ""
    gate: str | None = None
    beside: MlpNames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """Names of an architecture with mixtures of experts; see `ExpertsConfig`."""

    num_experts: tuple[str, ...]
    """Keys of config.json, of which one is there."""
    intermediate_size: str
    """Key of config.json."""
    shared: SharedKeys | None = None
    """None: no expert is shared."""
    has_normalised_weights: bool | None = None
    """None: `norm_topk_prob` decides."""
    default_has_normalised_weights: bool = False
    """`norm_topk_prob`, where config.json has none."""
    default_choice: str = "greedy"
    """`topk_method`, where config.json has none."""
    default_scores: str = "softmax"
    """`scoring_func`, where config.json has none."""
    module: str
    projections: tuple[str, ...]
    """Names of gate, where there is one, up and down."""
    router: str = "gate"
    has_bias: bool = False
    has_clamped_gate: bool = False
    """Whether `swiglu_alpha` and `swiglu_limit` describe the activation."""
    are_stacked: bool = False
    has_stacked_halves: bool = False
    """Whether a stack has all outputs of gate before those of up, which otherwise alternate."""
    has_weighted_inputs: bool = False
    """Whether an expert's weight multiplies what goes into it, and not what comes out."""
    can_be_none: bool = False
    """Whether 0 experts mean an MLP in each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Behaviour of a reference implementation that config.json does not state."""

    has_qkv_bias: bool | None
    """None: `attention_bias` decides, for the projection after attention too."""
    default_attention_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    reads_mlp_bias: bool = False
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    has_layer_types: bool = False
    """Whether `layer_types` say which layers have a window, and `use_sliding_window` whether any has."""
    has_alternating_windows: bool = False
    """Whether, without `layer_types`, windows are in every other layer up to `max_window_layers`, and not behind it."""
    has_window: bool = False
    """Whether `sliding_window` holds for every layer."""
    default_window: int | None = 4096
    can_drop_window: bool = False
    """Whether `sliding_window` holds only with `use_sliding_window`."""
    default_chunk_size: int | None = None
    """Default of `attention_chunk_size`: layers that `layer_types` name, or those that are rotated, see chunks. None:
    there is no such key."""
    default_nope_interval: int | None = None
    """Default of `no_rope_layer_interval`: every so many'th layer has no rotary embedding, unless `no_rope_layers` says
    which; see `NopeConfig`. None: all layers have one."""
    has_interleaved_pairs: bool = False
    """Whether rotary embedding turns neighbouring rows of a checkpoint's queries and keys."""
    window_pattern: int | None = None
    """Default of `sliding_window_pattern`: without `layer_types`, every so many'th layer has no window. None: there is
    no such key."""
    default_theta: float = 10_000.0
    default_windowed_theta: float | None = None
    """Base of layers with a window, which have rotary frequencies of their own; None: they have those of the others."""
    default_eps: float = 1e-6
    has_latent_attention: bool = False
    default_rotary_part: float | None = None
    """Default of `partial_rotary_factor`, the part of a head that is rotated; None: a whole head is."""
    has_gated_attention: bool = False
    recurrence: Recurrence | None = None
    """None: every layer has attention."""
    draft_layers: str | None = None
    """Key of config.json: number of layers behind the last one in a checkpoint, which draft."""
    default_has_tied_embeddings: bool = False
    mlp: MlpNames = MlpNames()
    mlp_size: str = "intermediate_size"
    """Key of config.json: size of an MLP."""
    has_position_type: bool = False
    """Whether layers have rotary embedding only if `position_embedding_type` is "rope"."""
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"
    default_query_scalar: int | None = None
    """Default of `query_pre_attn_scalar`, whose root divides scores; None: that of head_dim does."""
    has_scaled_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    has_single_blocks: bool = False
    """Whether its layers are a mixer or an MLP each (`engine.weights.nemotron`)."""
    has_multipliers: bool = False
    """Whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` hold."""
    has_offset_norms: bool = False
    has_output_norms: bool = False
    experts: ExpertKeys | None = None


_DEEPSEEK_EXPERTS = ExpertKeys(
    num_experts=("n_routed_experts",),
    intermediate_size="moe_intermediate_size",
    shared=SharedKeys(size="n_shared_experts", counts_experts=True, module="shared_experts", gate=None),
    module="mlp",
    projections=("gate_proj", "up_proj", "down_proj"),
)
_QWEN_SHARED_EXPERTS = ExpertKeys(
    num_experts=("num_experts",),
    intermediate_size="moe_intermediate_size",
    shared=SharedKeys(
        size="shared_expert_intermediate_size",
        counts_experts=False,
        module="shared_expert",
        gate="shared_expert_gate",
    ),
    module="mlp",
    projections=("gate_proj", "up_proj", "down_proj"),
)
_QWEN3_NEXT = Architecture(
    has_qkv_bias=None,
    has_qk_norm=True,
    default_head_dim=256,
    default_num_kv_heads=2,
    default_rotary_part=0.25,
    has_gated_attention=True,
    has_offset_norms=True,
    recurrence=Recurrence.GROUPED_DELTA,
    experts=replace(_QWEN_SHARED_EXPERTS, default_has_normalised_weights=True),
)
_GRANITE_MLP = MlpNames(module="shared_mlp", gate_up=("input_linear",), down="output_linear")
_GRANITE_SHARED = SharedKeys(size="shared_intermediate_size", counts_experts=False, beside=_GRANITE_MLP)
_GRANITE_EXPERTS = ExpertKeys(
    num_experts=("num_local_experts",),
    intermediate_size="intermediate_size",
    has_normalised_weights=True,  # a softmax over the chosen ones' logits
    module="block_sparse_moe",
    projections=("gate_proj", "up_proj", "down_proj"),
    router="router.layer",
    are_stacked=True,
    has_stacked_halves=True,
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(has_qkv_bias=None, reads_mlp_bias=True),
    "Llama4ForCausalLM": Architecture(
        has_qkv_bias=None,
        default_head_dim=128,
        default_num_kv_heads=8,
        default_chunk_size=8192,
        default_nope_interval=4,
        has_interleaved_pairs=True,
        default_theta=500_000.0,
        default_eps=1e-5,
        mlp=MlpNames(module="feed_forward"),
        mlp_size="intermediate_size_mlp",
        experts=ExpertKeys(
            num_experts=("num_local_experts",),
            intermediate_size="intermediate_size",
            shared=SharedKeys(size="intermediate_size", counts_experts=False, module="shared_expert", gate=None),
            has_normalised_weights=False,
            default_scores="sigmoid",
            module="feed_forward",
            projections=("gate_proj", "up_proj", "down_proj"),
            router="router",
            are_stacked=True,
            has_stacked_halves=True,
            has_weighted_inputs=True,
        ),
    ),
    "GraniteForCausalLM": Architecture(has_qkv_bias=None, reads_mlp_bias=True, has_multipliers=True),
    # Granite 4, with Mamba-2 layers or without, and with mixtures of experts or without.
    "GraniteMoeHybridForCausalLM": Architecture(
        has_qkv_bias=None,
        has_multipliers=True,
        has_position_type=True,
        recurrence=Recurrence.MAMBA,
        mlp=_GRANITE_MLP,
        mlp_size="shared_intermediate_size",
        experts=replace(_GRANITE_EXPERTS, shared=_GRANITE_SHARED, can_be_none=True),
    ),
    "GraniteMoeForCausalLM": Architecture(has_qkv_bias=None, has_multipliers=True, experts=_GRANITE_EXPERTS),
    "GraniteMoeSharedForCausalLM": Architecture(
        has_qkv_bias=None, has_multipliers=True, experts=replace(_GRANITE_EXPERTS, shared=_GRANITE_SHARED)
    ),
    "NemotronHForCausalLM": Architecture(
        has_qkv_bias=False,
        reads_mlp_bias=True,
        has_single_blocks=True,
        has_position_type=True,
        recurrence=Recurrence.MAMBA,
        default_head_dim=128,
        default_num_kv_heads=8,
        default_eps=1e-5,
        mlp=MlpNames(gate_up=("up_proj",)),
        activation=Activation.RELU2,
        activation_key="mlp_hidden_act",
        experts=replace(
            _DEEPSEEK_EXPERTS,
            shared=SharedKeys(
                size="moe_shared_expert_intermediate_size", counts_experts=False, module="shared_experts", gate=None
            ),
            default_has_normalised_weights=True,
            default_choice="noaux_tc",
            default_scores="sigmoid",
            projections=("up_proj", "down_proj"),
            can_be_none=True,
        ),
    ),
    "MistralForCausalLM": Architecture(has_qkv_bias=False, has_window=True, default_num_kv_heads=8),
    "Gemma3ForCausalLM": Architecture(
        has_qkv_bias=None,
        has_qk_norm=True,
        default_head_dim=256,
        default_num_kv_heads=4,
        has_layer_types=True,
        window_pattern=6,
        default_theta=1_000_000.0,
        default_windowed_theta=10_000.0,
        default_has_tied_embeddings=True,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        default_query_scalar=256,
        has_scaled_embeddings=True,
        has_offset_norms=True,
        has_output_norms=True,
    ),
    "MixtralForCausalLM": Architecture(
        has_qkv_bias=False,
        has_window=True,
        default_window=None,
        default_num_kv_heads=8,
        default_theta=1_000_000.0,
        default_eps=1e-5,
        experts=ExpertKeys(
            num_experts=("num_local_experts",),
            intermediate_size="intermediate_size",
            has_normalised_weights=True,
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "GptOssForCausalLM": Architecture(
        has_qkv_bias=None,
        default_attention_bias=True,
        has_sinks=True,
        default_head_dim=64,
        default_num_kv_heads=8,
        has_layer_types=True,
        window_pattern=2,
        default_window=128,
        default_theta=150_000.0,
        default_eps=1e-5,
        experts=ExpertKeys(
            num_experts=("num_local_experts",),
            intermediate_size="intermediate_size",
            has_normalised_weights=True,  # a softmax over the chosen ones' logits
            module="mlp",
            projections=("gate_proj", "up_proj", "down_proj"),
            router="router",
            has_bias=True,
            has_clamped_gate=True,
            are_stacked=True,
        ),
    ),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True, has_layer_types=True, default_num_kv_heads=32),
    "Qwen2MoeForCausalLM": Architecture(
        has_qkv_bias=True,
        has_layer_types=True,
        has_alternating_windows=True,
        default_num_kv_heads=16,
        experts=_QWEN_SHARED_EXPERTS,
    ),
    # Qwen2 with a draft layer in the same checkpoint.
    "MiMoForCausalLM": Architecture(has_qkv_bias=True, has_layer_types=True, default_num_kv_heads=32),
    "Qwen3ForCausalLM": Architecture(
        has_qkv_bias=None, has_qk_norm=True, has_layer_types=True, default_head_dim=128, default_num_kv_heads=32
    ),
    "DeepseekV2ForCausalLM": Architecture(has_qkv_bias=None, has_latent_attention=True, experts=_DEEPSEEK_EXPERTS),
    # Kimi K2 is one, too.
    "DeepseekV3ForCausalLM": Architecture(
        has_qkv_bias=None,
        has_latent_attention=True,
        draft_layers="num_nextn_predict_layers",
        experts=replace(_DEEPSEEK_EXPERTS, default_choice="noaux_tc", default_scores="sigmoid"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        has_qkv_bias=None,
        has_qk_norm=True,
        has_window=True,
        can_drop_window=True,
        default_num_kv_heads=4,
        experts=ExpertKeys(
            num_experts=("num_experts", "num_local_experts"),
            intermediate_size="moe_intermediate_size",
            module="mlp",
            projections=("gate_proj", "up_proj", "down_proj"),
        ),
    ),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": replace(_QWEN3_NEXT, default_num_kv_heads=4, recurrence=Recurrence.DELTA, experts=None),
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN3_NEXT,
        recurrence=Recurrence.DELTA,
        experts=replace(_QWEN_SHARED_EXPERTS, has_normalised_weights=True),
    ),
}
_WRAPPED = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}
"""Architecture of the language model in a multimodal one, whose `text_config` describes it."""


def language_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says of a multimodal model's language model; all of it for others."""
    names = [_WRAPPED[name] for name in raw.get("architectures") or () if name in _WRAPPED]
    inner = raw.get("text_config")
    return {**inner, "architectures": names} if names and isinstance(inner, Mapping) else raw
