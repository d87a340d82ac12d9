"""Every causal language model of the installed transformers as a tiny random target, listed and shrunk by code.

`model_types` lists them; `tiny_config` makes the default configuration of one small by the names of its numbers. A few
families name or couple their numbers in ways of their own; `OWN` says so.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from paceline.target_model.facts import model_class

LAYERS, HIDDEN, VOCAB = 4, 32, 97
MAX_PARAMETERS = 160_000_000

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "n_vocab", "padded_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "embed_dim", "word_embed_proj_dim"), HIDDEN
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_decoder_layers",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8
    ),
    "qk_head_dim": 16,
    **dict.fromkeys(("global_head_dim",), 8),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "dff", "decoder_ffn_dim", "encoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_intermediate_size",
            "intermediate_size_mlp",
            "moe_shared_expert_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_groups", "mamba_n_groups", "n_shared_experts", "num_shared_experts"), 1
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim", "lora_rank_decay"), 16),
    **dict.fromkeys(("index_n_heads", "index_topk"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention_window"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    "mamba_expand": 2,
    "rotary_dim": 8,
    "lru_width": 32,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "is_decoder": True,
    "add_cross_attention": False,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl", "hunyuan_vl"), MROPE),
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glmga"), MROPE),
    "glm4v_moe": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    "ernie4_5_vl_moe": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "cohere_compass": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots3_note": {"head_dim": 16},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_d_head": 16},
    "mistral4": {"qk_rope_head_dim": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "reformer": {"axial_pos_embds": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "glm5_next": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
"""Numbers that a family couples in its own way."""
OUTER: dict[str, dict[str, Any]] = {
    "apertus1p5": {"audio_config": {"codebook_dim": HIDDEN}},
    "emu3": {
        "architectures": ["Emu3ForConditionalGeneration"],
        "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6},
    },
    "mllama": {"architectures": ["MllamaForConditionalGeneration"]},
    "dots3_note": {
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1], "text_hidden_size": HIDDEN}},
    "muse_spark": {"audio_config": {"out_hidden_size": HIDDEN}, "vision_config": {"out_hidden_size": HIDDEN}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "4/8", "vision_config": {"hidden_size": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": HIDDEN}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": HIDDEN}},
    "granite_docling": {"vision_config": {"out_hidden_size": HIDDEN}},
}
"""The same outside the text part; mappings are changes to another part."""


def model_types() -> list[str]:
    """Model types with a causal language model, wrappers around one included, in alphabetical order."""
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted({name for table in tables for name in table})


def no_target(config: Any, model: Any = None) -> str | None:
    """Why a type is no target at all, in words; None where it should be one."""
    if config.is_encoder_decoder:
        return "encoder-decoder"
    if model is not None:
        required = [
            name
            for name, entry in inspect.signature(model.forward).parameters.items()
            if entry.default is entry.empty and entry.kind is entry.POSITIONAL_OR_KEYWORD and name != "input_ids"
        ]
        if required:
            return f"its forward needs {', '.join(required)}"
    return None


def shrink(config: Any) -> dict[str, Any]:
    """The numbers of a configuration that are to be changed, by name."""
    changes = {}
    written = config.to_dict()
    for name, value in SMALL.items():
        known = written.get(name, type(config).attribute_map.get(name) and 1)
        fits = name.endswith("token_id") or not isinstance(known, (list, tuple))
        if (name in written or name in type(config).attribute_map) and fits:
            changes[name] = value
    rope = written.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # three parts of half a head
        changes["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    if "kv_lora_rank" in written:  # latent attention: every head has its own key
        changes["num_key_value_heads"] = 4
    return changes


def tiny_config(model_type: str, **more: Any) -> Any:
    """A small configuration of a type.

    Raises:
        Exception: whatever the family says about numbers that do not go together.
    """
    default = AutoConfig.for_model(model_type)
    if default.is_encoder_decoder:
        return default
    text = default.get_text_config(decoder=True)
    own = {**OWN.get(model_type, {}), **more}
    if text is default:
        return AutoConfig.for_model(model_type, **{**shrink(default), **own})
    key = next(name for name in ("text_config", "decoder", "generator") if getattr(default, name, None) is text)
    parts = {}
    for name, part in vars(default).items():
        if hasattr(part, "model_type") and name != key:
            more_of_it = OUTER.get(model_type, {}).get(name, {})
            parts[name] = {**shrink_tower(part), **more_of_it, "model_type": part.model_type}
    small = {**shrink(text), **own, "model_type": text.model_type}
    outer = {name: value for name, value in OUTER.get(model_type, {}).items() if name not in parts}
    tokens = {name: value for name, value in shrink(default).items() if name.endswith("token_id")}
    return AutoConfig.for_model(model_type, **{key: small, **parts, **tokens, **outer})


def shrink_tower(config: Any) -> dict[str, Any]:
    """As `shrink`, for a vision or audio part that is never run."""
    return {name: value for name, value in shrink(config).items() if name != "vocab_size"}


def num_parameters(config: Any) -> int:
    """Weights of a configuration's model, without memory for them."""
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def build(config: Any, seed: int = 0) -> Any:
    """A random model of a configuration, in float32, evaluation mode."""
    torch.manual_seed(seed)
    return model_class(config).from_config(config).eval()


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters
