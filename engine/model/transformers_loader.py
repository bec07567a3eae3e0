"""Loads decoders that transformers computes.

`TESTED_ARCHITECTURES` are tested against transformers on tiny random checkpoints
(tests/engine/test_transformers_models.py); others are refused. For the installed version of transformers, a model must
also pass a trial run (`engine.model.transformers_trial`) and, once loaded, agree with transformers' own attention
(`engine.model.transformers_check`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model.config import TransformersConfig, UnsupportedModel
from engine.model.loader import weight_files
from engine.model.transformers_check import check_against_transformers
from engine.model.transformers_decoder import PAGED_ATTENTION, TransformersDecoder, register_paged_attention
from engine.model.transformers_trial import causal_lm_class, pin_rotary_frequencies, pretrained_config, refusing

TESTED_ARCHITECTURES = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MinistralForCausalLM",
        "MixtralForCausalLM",
        "NanoChatForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)


def load_transformers_decoder(
    model_dir: Path, config: TransformersConfig, *, dtype: torch.dtype, device: torch.device
) -> TransformersDecoder:
    """Return the decoder of a checkpoint folder, whose `config` comes from `read_transformers_config`.

    Reads only local safetensors files and runs no code of a checkpoint. Raises UnsupportedModel when the architecture
    is untested, a tensor is missing, unknown or of another shape, or logits differ from transformers' own.
    """
    if config.architecture not in TESTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {config.architecture} is not supported; through transformers these are:"
            f" {', '.join(sorted(TESTED_ARCHITECTURES))}"
        )
    causal_lm = _load_causal_lm(model_dir, dtype).to(device)
    decoder = TransformersDecoder(config, causal_lm)
    with refusing(f"{config.architecture} cannot run"):
        check_against_transformers(decoder, causal_lm)
    return decoder


def _load_causal_lm(model_dir: Path, dtype: torch.dtype) -> Any:
    """Return the checkpoint's model, on the CPU, with our attention."""
    register_paged_attention()
    weight_files(model_dir)  # raises unless they are complete safetensors files
    if (model_dir / "adapter_config.json").exists():
        raise UnsupportedModel(f"{model_dir} holds an adapter (adapter_config.json); adapters are not supported")
    config = pretrained_config(model_dir)
    with refusing(f"cannot load {model_dir}"), _no_progress_bar():
        model, report = causal_lm_class(config).from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for key, problem in (("missing_keys", "missing in the checkpoint"), ("unexpected_keys", "of no known place")):
        if report[key]:
            names = sorted(report[key])
            raise UnsupportedModel(f"{len(names)} tensors are {problem}, {names[0]} among them")
    pin_rotary_frequencies(model)
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on stderr, which has log lines."""
    transformers_logging: Any = transformers.utils.logging
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
