"""What the engine needs to know of a decoder that transformers computes."""

from dataclasses import dataclass

from engine.ops.torch_attention import ScoreFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """A decoder's outer shape and what each of its layers asks of attention.

    Learnt from a trial run (`engine.model.transformers_trial`), not from config.json's many names for it.
    """

    architecture: str
    """The class in transformers, such as "Gemma2ForCausalLM"."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Up to here the rotary frequencies are those of short texts; a model that changes them later ends here."""
    windows: tuple[int | None, ...]
    """Of each layer: a token attends to so many tokens, itself included; None: to all."""
    scores: tuple[ScoreFunction, ...]
    """Of each layer."""
    source: str
    """Digest of config.json and the version of transformers: whatever else the arithmetic depends on."""
