"""A small Llama: the model of the demo, the examples and the benchmarks.

It has RMSNorm, rotary positions (in real arithmetic, so that every backend can compile them), grouped-query
attention by `F.scaled_dot_product_attention`, SwiGLU and cross-entropy. `forward(tokens, targets)`
returns the loss, so that the whole forward is one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from overlapc.errors import ConfigError


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model. `dim` is divided among `heads`; `heads` share `kv_heads` keys and values."""

    dim: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    vocab: int = 256
    max_seq: int = 256
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ConfigError(f"dim {self.dim} is not an even number of elements for each of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} keys and values evenly")

    @property
    def head_dim(self) -> int:
        """The number of elements of one head."""
        return self.dim // self.heads

    @classmethod
    def llama_8b(cls, layers: int = 8, max_seq: int = 4096) -> LlamaConfig:
        """Return the published 8B shape, with 8 of its 32 layers by default."""
        return cls(4096, layers, 32, 8, 14336, 32_000, max_seq, 500_000.0)

    @classmethod
    def llama_70b(cls, layers: int = 80, max_seq: int = 4096) -> LlamaConfig:
        """Return the published 70B shape, except for its vocabulary, which is that of the 8B shape here."""
        return cls(8192, layers, 64, 8, 28672, 32_000, max_seq, 500_000.0)

    @classmethod
    def tiny(cls) -> LlamaConfig:
        """Return a shape for tests, which compiles in seconds."""
        return cls(dim=32, layers=2, heads=4, kv_heads=2, ffn=64, max_seq=64)


def rotary_tables(cfg: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions and frequencies, fp32 `[max_seq, head_dim]`, with both halves equal."""
    frequency = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)
    angle = torch.outer(torch.arange(cfg.max_seq, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((angle.sin(), angle.sin()), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[batch, heads, seq, head_dim]` by its positions, in fp32. The result has the dtype of `x`."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention. Under tensor parallelism each rank holds whole heads."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.wq = nn.Linear(cfg.dim, cfg.heads * cfg.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.wo = nn.Linear(cfg.heads * cfg.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is `[batch, seq, dim]`, the tables `[seq, head_dim]`."""
        batch, seq = x.shape[:2]
        query, key, value = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for proj in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.ffn, bias=False)
        self.w2 = nn.Linear(cfg.ffn, cfg.dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result are `[batch, seq, dim]`."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection around both."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.attention = Attention(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.feed_forward = FeedForward(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` and the result are `[batch, seq, dim]` (with sequence parallelism, this rank's part of `seq`)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model; `forward` returns the mean cross-entropy over all tokens as an fp32 scalar."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=1e-5)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        cos, sin = rotary_tables(cfg)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def reset_parameters(self, seed: int = 0) -> None:
        """Set weights to normal random numbers of deviation 0.02 and norms to one, the same on every rank."""
        generator = torch.Generator(device=self.embed.weight.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.02, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`tokens` and `targets` are int64 `[batch, seq]`, `seq` at most `max_seq`."""
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_tensor_parallel(cfg: LlamaConfig, ways: int) -> None:
    """Raise ConfigError unless heads, feed-forward and vocabulary divide evenly among `ways` ranks."""
    for what, size in (("key-value heads", cfg.kv_heads), ("feed-forward", cfg.ffn), ("vocabulary", cfg.vocab)):
        if size % ways:
            raise ConfigError(f"--tp {ways} does not divide the {what} of this model ({size})")


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Shard heads, feed-forward and vocabulary over `mesh`, and the sequence between them; in place.

    Each rank has a part of the sequence in the residual stream, so each block all-gathers it twice and
    reduce-scatters it twice. ConfigError if the model does not divide evenly among the ranks.
    """
    check_tensor_parallel(model.cfg, mesh.size())
    root: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, root)
    for layer in model.layers:
        block: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(layer, mesh, block)
    return model
