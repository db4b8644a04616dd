"""Models that benchmarks capture, and the graphs that overlapc and Inductor get for them.

`overlapc_graphs` and `inductor_graphs` capture forward and backward of one model, each with its own decompositions
and partitioner, and hand every graph to a function instead of to code generation. The model then runs eagerly, so
parameters are real and ought to be small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.decompositions import decompositions
from overlapc.fx.partitioning.partition import partition
from overlapc.ir.ops import LoweredGraph
from overlapc.launch.llama import Block, Llama, LlamaConfig, rotary_tables
from overlapc.lowering import lower

Model = tuple[nn.Module, tuple[Tensor, ...]]
# (graph, its example inputs, "forward" | "backward")
Visit = Callable[[GraphModule, Sequence[Any], str], None]


class LlamaBlock(nn.Module):
    """One transformer layer of a Llama, from residual stream to residual stream."""

    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.block = Block(cfg)
        cos, sin = rotary_tables(cfg)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` in and out."""
        return self.block(x, self.cos, self.sin)


class BertBlock(nn.Module):
    """One encoder layer of a BERT: post-norm, biases, exact GELU."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.attention_norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` in and out."""
        batch, seq, dim = x.shape
        query, key, value = (
            proj(x).view(batch, seq, self.heads, -1).transpose(1, 2) for proj in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, seq, dim)
        x = self.attention_norm(x + self.out(mixed))
        return self.norm(x + self.down(F.gelu(self.up(x))))


def llama_block(device: str, dtype: torch.dtype, dim: int = 512, batch: int = 4, seq: int = 256) -> Model:
    """Return a block with Llama-8B's proportions at width `dim`, and its input."""
    cfg = LlamaConfig(dim=dim, layers=1, heads=dim // 64, kv_heads=max(1, dim // 256), ffn=3 * dim, max_seq=seq)
    model = LlamaBlock(cfg).to(device)
    model.block.to(dtype)
    return model, (torch.randn(batch, seq, dim, device=device, dtype=dtype, requires_grad=True),)


def bert_block(device: str, dtype: torch.dtype, dim: int = 512, batch: int = 4, seq: int = 256) -> Model:
    """Return a block with BERT-base's proportions at width `dim`, and its input."""
    model = BertBlock(dim, dim // 64, 4 * dim).to(device, dtype)
    return model, (torch.randn(batch, seq, dim, device=device, dtype=dtype, requires_grad=True),)


def llama(layers: int, device: str = "cpu") -> Model:
    """Return a whole Llama with its loss, narrow enough to capture 80 layers in seconds, and its inputs."""
    cfg = LlamaConfig(dim=64, layers=layers, heads=4, kv_heads=2, ffn=192, vocab=256, max_seq=32)
    model = Llama(cfg).to(device)
    tokens = torch.randint(0, cfg.vocab, (2, cfg.max_seq), device=device)
    return model, (tokens, tokens.roll(-1, 1))


def overlapc_graphs(model: Model, visit: Visit) -> None:
    """Call `visit` with the forward and backward graphs that overlapc gets."""

    def compiler(gm: GraphModule, inputs: Sequence[Any], which: str) -> Any:
        canonicalize(gm)
        visit(gm, inputs, which)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=partial(compiler, which="forward"),
        bw_compiler=partial(compiler, which="backward"),
        decompositions=decompositions(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    _train_once(model, backend)


def inductor_graphs(model: Model, visit: Visit) -> None:
    """Call `visit` with the forward and backward graphs that Inductor lowers, after its graph passes."""
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        compile_fx,
        record_original_output_strides,
        view_to_reshape,
    )

    def inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        run = make_boxed_func(copy.deepcopy(gm).forward)
        view_to_reshape(gm)
        record_original_output_strides(gm)
        _recursive_post_grad_passes(gm, is_inference=False)
        visit(gm, inputs, "backward" if kwargs.get("is_backward") else "forward")
        return run

    _train_once(model, lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner))


def _train_once(model: Model, backend: Any) -> None:
    module, inputs = model
    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*inputs).sum().backward()


def lowered(gm: GraphModule, name: str) -> LoweredGraph:
    """Return the loop IR of a graph without communication, as if every device had a code generator."""
    return lower(gm, name)


def inductor_scheduled(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    """Return Inductor's graph after lowering, scheduling and fusion of `gm`; generates no code."""
    from torch._guards import detect_fake_mode
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    with V.set_fake_mode(mode), DebugContext():
        graph = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            graph._update_scheduler()
    return graph
