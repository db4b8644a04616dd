"""The models of huggingface.py, as their authors wrote them: in the sizes that people use, with random weights.

A `Case` makes a model and a batch for it. Each case also has a `tiny` configuration of the same code, for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

Inputs = dict[str, Tensor]
_DEPTHS = ("num_hidden_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")  # names of numbers of layers


@dataclass(frozen=True)
class Case:
    """A model in two sizes; `blocks` names the classes of modules that are sharded, in addition to the whole model."""

    make: Callable[[Mapping[str, Any]], nn.Module]
    inputs: Callable[[Mapping[str, Any], int, int, str], Inputs]  # arguments: config, rows, row length, device
    blocks: tuple[str, ...]
    batch: tuple[int, int]  # rows per GPU, length of a row
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]

    def shape(self, tiny: bool, layers: int | None = None) -> Mapping[str, Any]:
        """Return the configuration; `layers` replaces its numbers of layers (the tiny one has two)."""
        shape = {**self.config, **self.tiny} if tiny else self.config
        return shape if layers is None else {**shape, **{name: layers for name in _DEPTHS if name in shape}}

    @property
    def layers(self) -> int:
        """The layers of the model as its authors wrote it; of the encoder, if it also has a decoder."""
        return next(int(self.config[name]) for name in _DEPTHS if name in self.config)


def sharded(case: Case, shape: Mapping[str, Any], device: str, compile_blocks: bool, breaks: bool = False) -> nn.Module:
    """Return the model in training mode, its blocks and the whole model sharded by FSDP2 over all ranks.

    breaks: let each block break the graph before its last module. Weights are float32, drawn from one seed; compute is
    in bfloat16, gradients are reduced in float32.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = case.make(shape)
    model.train()
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in [module for module in model.modules() if type(module).__name__ in case.blocks]:
        if breaks:
            [*block.children()][-1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        if compile_blocks:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _made(model: str, config: str, **fixed: Any) -> Callable[[Mapping[str, Any]], nn.Module]:
    """Return a function that makes transformers' class `model` from its configuration class `config`."""

    def make(shape: Mapping[str, Any]) -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fixed, **shape))
        return made

    return make


def _tokens(shape: Mapping[str, Any], rows: int, length: int, device: str) -> Inputs:
    tokens = torch.randint(3, shape["vocab_size"], (rows, length), device=device)
    return {"input_ids": tokens, "labels": tokens}


def _images(shape: Mapping[str, Any], rows: int, length: int, device: str) -> Inputs:
    side = shape["image_size"]
    labels = torch.randint(shape["num_labels"], (rows,), device=device)
    return {"pixel_values": torch.randn(rows, 3, side, side, device=device), "labels": labels}


def _speech(shape: Mapping[str, Any], rows: int, length: int, device: str) -> Inputs:
    features = torch.randn(rows, shape["num_mel_bins"], 2 * shape["max_source_positions"], device=device)
    return {"input_features": features, "labels": torch.randint(3, shape["vocab_size"], (rows, length), device=device)}


def _latents(shape: Mapping[str, Any], rows: int, length: int, device: str) -> Inputs:
    size = (rows, 4, shape["side"], shape["side"])
    return {
        "latents": torch.randn(size, device=device),
        "noise": torch.randn(size, device=device),
        "times": torch.rand(rows, device=device),
        "classes": torch.randint(1000, (rows,), device=device),
    }


# --- a diffusion transformer, as DiT's authors wrote it


class Loss(NamedTuple):
    """The result of a model here; transformers' models return more."""

    loss: Tensor


class DiTBlock(nn.Module):
    """Attention and a feed-forward net, each between a modulated norm and a gated residual (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: `[rows, tokens, width]`; condition: `[rows, width]`."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self._attended(_modulated(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(_modulated(self.norm2(x), shift2, scale2))

    def _attended(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(rows, tokens, width))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiT(nn.Module):
    """Predicts the noise in latents of `[rows, 4, side, side]`, by patches of 2 x 2."""

    def __init__(self, width: int, depth: int, heads: int, side: int) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // 2) ** 2, width))
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, 16)

    def forward(self, latents: Tensor, noise: Tensor, times: Tensor, classes: Tensor) -> Loss:
        """noise: of the latents' shape; times: `[rows]`, of [0, 1); classes: `[rows]` int64."""
        at = times[:, None, None, None]
        noisy = (1 - at) * latents + at * noise
        rates = torch.exp(-math.log(10000) * torch.arange(128, device=times.device) / 128)
        angles = 1000 * times[:, None] * rates
        embedded = torch.cat((angles.cos(), angles.sin()), -1).to(noisy.dtype)
        condition = self.times(embedded) + self.classes(classes)
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        x = self.out(_modulated(self.norm(x), shift, scale))
        side = noisy.shape[-1] // 2
        x = x.view(-1, side, side, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(noisy.shape)
        return Loss(F.mse_loss(x.float(), noise.float()))


# --- the models

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_WORDS = {"vocab_size": 256}
_NO_CACHE = {"use_cache": False}

CASES: dict[str, Case] = {
    "llama-1b": Case(
        _made("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **_NO_CACHE),
        _tokens,
        ("LlamaDecoderLayer",),
        (2, 4096),
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192,
        },
        {**_SMALL, **_WORDS, "num_key_value_heads": 2},
    ),
    "qwen3-0.6b": Case(
        _made("Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True, **_NO_CACHE),
        _tokens,
        ("Qwen3DecoderLayer",),
        (2, 4096),
        {
            "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 8192,
        },
        {**_SMALL, **_WORDS, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3-moe": Case(
        _made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_NO_CACHE),
        _tokens,
        ("Qwen3MoeDecoderLayer",),
        (2, 4096),
        {
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
            "intermediate_size": 3072, "vocab_size": 50304, "max_position_embeddings": 8192,
        },
        {**_SMALL, **_WORDS, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
    ),
    "gemma3-1b": Case(
        _made("Gemma3ForCausalLM", "Gemma3TextConfig", **_NO_CACHE),
        _tokens,
        ("Gemma3DecoderLayer",),
        (2, 4096),
        {
            "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "max_position_embeddings": 8192,
            "sliding_window": 512,
        },
        {**_SMALL, **_WORDS, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
         "sliding_window_pattern": 2},
    ),
    "modernbert-large": Case(
        _made("ModernBertForMaskedLM", "ModernBertConfig"),
        _tokens,
        ("ModernBertEncoderLayer",),
        (8, 2048),
        {
            "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624,
            "vocab_size": 50368, "max_position_embeddings": 8192,
        },
        {**_SMALL, **_WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "cls_token_id": 1,
         "sep_token_id": 2},
    ),
    "vit-large": Case(
        _made("ViTForImageClassification", "ViTConfig"),
        _images,
        ("ViTLayer",),
        (128, 197),
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "image_size": 224, "patch_size": 16, "num_labels": 1000,
        },
        {**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 5},
    ),
    "whisper-small": Case(
        _made("WhisperForConditionalGeneration", "WhisperConfig", **_NO_CACHE),
        _speech,
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        (16, 448),
        {
            "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 51865,
            "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448,
        },
        {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16,
            "max_source_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1, **_WORDS,
        },
    ),
    "dit-large": Case(
        lambda shape: DiT(**shape),
        _latents,
        ("DiTBlock",),
        (64, 256),
        {"width": 1024, "depth": 24, "heads": 16, "side": 32},
        {"width": 64, "depth": 2, "heads": 4, "side": 8},
    ),
    "gpt2-medium": Case(
        _made("GPT2LMHeadModel", "GPT2Config", **_NO_CACHE),  # with its dropout of 0.1
        _tokens,
        ("GPT2Block",),
        (16, 1024),
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257, "n_positions": 1024},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, **_WORDS},
    ),
}  # fmt: skip
