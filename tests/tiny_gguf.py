"""A tiny random Qwen3 in one GGUF file: 8-bit matrices, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from tiny_targets import TINY, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAD = 128
"""Width of a head: transformers reads none from a Qwen3 file and takes the usual one."""
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll")]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def save_gguf(file: Path, seed: int = 0) -> Path:
    """Writes the file; returns it."""
    model = tiny_model("qwen3", seed, vocab_size=len(TOKENS), head_dim=HEAD)
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, TINY["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        place = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(place, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(place, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
