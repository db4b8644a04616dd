"""Trains a transformer parallelized like torchtitan's: tensor and sequence parallel, activation checkpoints, and FSDP2
over the other ranks.

overlapc plan tests/launch/scripts/tensor_parallel.py --world-size 16,64 -- --tp 8
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import overlapc

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--vocabulary", type=int, default=32_000)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--seq", type=int, default=4096)
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.width, args.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (
            w(x).view(batch, length, -1, args.width // args.heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = 4 * args.width
        self.w1, self.w3 = (nn.Linear(args.width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.width), nn.RMSNorm(args.width)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(args.layers)})
        self.norm = nn.RMSNorm(args.width)
        self.output = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def apply_tp(model: Transformer, mesh: object) -> None:
    parallelize_module(model, mesh, {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip
    for block in model.layers.values():
        parallelize_module(block, mesh, {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        })  # fmt: skip


device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp_shard", "tp"))
with torch.device("meta"):
    model = Transformer()
apply_tp(model, mesh["tp"])
for name, block in model.layers.named_children():
    model.layers.register_module(name, checkpoint_wrapper(block))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.layers.values():
    fully_shard(block, mesh=mesh["dp_shard"], mp_policy=policy)
fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
model.to_empty(device="cuda")
with torch.no_grad():
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
model = torch.compile(overlapc.adopt_fsdp2(model), backend="overlapc", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

for step in range(10):
    tokens = torch.randint(args.vocabulary, (args.batch, args.seq + 1), device=device)
    optimizer.zero_grad()
    pred = model(tokens[:, :-1])
    loss = F.cross_entropy(pred.flatten(0, 1).float(), tokens[:, 1:].flatten(0, 1))
    del pred
    loss.backward()
    optimizer.step()
    print(f"step: {step}  loss: {loss.item():7.4f}")
dist.destroy_process_group()
