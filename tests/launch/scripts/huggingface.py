"""Trains a causal language model of transformers: FSDP2 by layer, bf16, fused AdamW, gradient clipping.

overlapc plan tests/launch/scripts/huggingface.py --world-size 8,64
overlapc run --nproc 2 tests/launch/scripts/huggingface.py --measure
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import overlapc

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--vocabulary", type=int, default=128_256)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--seq", type=int, default=4096)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--measure", action="store_true", help="profile the last steps, and print what they take")
args = parser.parse_args()

device = torch.device(args.device, int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
if args.device == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("dp",))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    intermediate_size=4 * args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=max(1, args.heads // 4),
    tie_word_embeddings=True,
)
with torch.device(device):
    model = LlamaForCausalLM(config)
model.train()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model = overlapc.adopt_fsdp2(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
step = torch.compile(model, backend="overlapc")

generator = torch.Generator().manual_seed(1 + dist.get_rank())


def forward_backward() -> torch.Tensor:
    tokens = torch.randint(args.vocabulary, (args.batch, args.seq), generator=generator).to(device)
    loss = step(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


def update() -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


measured = args.measure and args.device == "cuda"
spans = []
for _ in range(args.steps):
    if measured:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    loss = forward_backward()
    if measured:
        end.record()
        spans.append((begin, end))
    update()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
if args.measure:
    with overlapc.report.measure(last=3):
        for _ in range(6):
            forward_backward()
            update()
if measured and dist.get_rank() == 0:
    last = [begin.elapsed_time(end) for begin, end in spans[args.steps // 2 :]]
    print(f"forward and backward: {statistics.median(last):.3f} ms, the median of {len(last)}")
dist.destroy_process_group()
