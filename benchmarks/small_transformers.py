"""Small models of the installed transformers' text and image classes, for other_packages.py.

A configuration is shrunk by the names of its fields, which architectures share: `hidden_size`, `num_hidden_layers` and
so on. Some architectures need a combination of sizes that this does not give; such a model fails in eager mode, too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_GROUPS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
_WIDTH, _WORDS, _LENGTH = 32, 99, 12

_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embed_dim attention_hidden_size word_embed_proj_dim".split(), _WIDTH
    ),
    **dict.fromkeys("lru_width moe_intermediate_size shared_expert_intermediate_size".split(), _WIDTH),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads mamba_n_heads mamba_num_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads index_n_heads linear_num_value_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads linear_num_key_heads num_experts_per_tok num_codebooks".split(), 2),
    **dict.fromkeys("head_dim d_kv kv_channels linear_key_head_dim linear_value_head_dim v_head_dim".split(), 8),
    **dict.fromkeys(
        "qk_nope_head_dim qk_rope_head_dim index_head_dim hidden_size_per_layer_input patch_size".split(), 8
    ),
    "relative_attention_num_buckets": 8,
    **dict.fromkeys("intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim".split(), 64),
    **dict.fromkeys("ffn_hidden_size inner_dim max_position_embeddings n_positions n_ctx max_seq_len".split(), 64),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts index_topk laurel_rank".split(), 4),
    **dict.fromkeys("state_size mamba_d_state chunk_size mamba_chunk_size block_size rotary_dim".split(), 4),
    **dict.fromkeys("q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim embedding_size".split(), 16),
    **dict.fromkeys("vocab_size vocab_size_per_layer_input".split(), _WORDS),
    **dict.fromkeys("n_group topk_group mamba_n_groups n_groups first_k_dense_replace".split(), 1),
    "sliding_window": 5,
    "image_size": 32,
    "num_nextn_predict_layers": 0,
    "layer_types": None,
    "use_cache": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DRAWN = ("drop", "noise", "jitter")  # parts of names of probabilities and amplitudes: these draw random numbers


def names() -> Iterator[str]:
    """Yield the names of classes, each once."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, None] = {}
    for group in _GROUPS:
        for classes in getattr(mappings, f"MODEL_FOR_{group}_MAPPING_NAMES").values():
            found.update(dict.fromkeys([classes] if isinstance(classes, str) else classes))
    yield from found


def small(name: str) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """Return a model of the class `name` of transformers, without dropout or zero parameters, and its inputs."""
    kind = getattr(importlib.import_module("transformers"), name)
    model = kind(_shrunk(kind.config_class()))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # zeros hide errors, and a router with them chooses among equal scores
                parameter.normal_(0.0, 0.02)
    return model, (), _inputs(model)


def _shrunk(config: Any) -> Any:
    """Return `config` with small sizes and nothing random, and so for the configurations within it."""
    changed: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            changed[name] = _shrunk(part).to_dict()
        elif name in _SIZES and not isinstance(value, dict) and (name == "layer_types" or not isinstance(value, list)):
            changed[name] = _SIZES[name]
        elif isinstance(value, float) and any(part in name for part in _DRAWN):
            changed[name] = 0.0
    if "qk_rope_head_dim" in changed:  # attention with latent keys: the head's size is the sum of two others
        changed.pop("head_dim", None)
        changed["num_key_value_heads"] = _SIZES["num_attention_heads"]
    return type(config)(**changed)


def _inputs(model: Any) -> dict[str, Tensor]:
    """Return two images, or two texts of which the second is padded, with labels if the model takes them."""
    taken = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        config, side = model.config, getattr(model.config, "image_size", _SIZES["image_size"])
        side = side if isinstance(side, int) else _SIZES["image_size"]
        given = {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)}
        labels = torch.tensor([0, 1])
    else:
        words, mask = torch.randint(3, 90, (2, _LENGTH)), torch.ones(2, _LENGTH, dtype=torch.int64)
        mask[1, 9:] = 0
        given = {"input_ids": words, "attention_mask": mask, "decoder_input_ids": words}
        labels = torch.randint(3, 90, (2, _LENGTH))
        if "labels" in taken:
            del given["decoder_input_ids"]  # made from the labels
    return {name: value for name, value in {**given, "labels": labels}.items() if name in taken}
