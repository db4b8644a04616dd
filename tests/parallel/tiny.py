"""A small transformer-like model and a recording backend for tests of sharding and partitioning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from overlapc.fx.partitioning.partition import partition

VOCAB = 24


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, ac: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.ac = ac

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = checkpoint(self.mlp, h, use_reentrant=False) if self.ac == "inside" else self.mlp(h)
        return x + h


class Tiny(nn.Module):
    """Embedding, blocks, head; `forward` returns the mean cross-entropy.

    one_row: adds a parameter of a single row to the embeddings, like a ViT's class token: only one rank has a shard.
    """

    def __init__(
        self,
        dim: int = 8,
        hidden: int = 16,
        layers: int = 2,
        tied: bool = False,
        ac: str = "",
        vocab: int = VOCAB,
        one_row: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, hidden, ac) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.ac = ac
        self.start = nn.Parameter(torch.randn(1, 1, dim)) if one_row else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.start is not None:
            h = h + self.start
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.ac == "around" else layer(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


@dataclass
class Recorder:
    """A backend that runs graphs unchanged and records them."""

    partition_fn: Callable[..., Any] = partition
    decompositions: dict[Any, Callable[..., Any]] | None = None
    forward: list[fx.GraphModule] = field(default_factory=list)
    backward: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Any:
        from functorch.compile import make_boxed_func

        def keep(where: list[fx.GraphModule]) -> Callable[..., Any]:
            def compiler(module: fx.GraphModule, _inputs: list[Any]) -> Any:
                where.append(module)
                return make_boxed_func(module.forward)

            return compiler

        return aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=self.partition_fn,
            decompositions=self.decompositions,
            keep_inference_input_mutations=True,  # as the backend does
        )(graph_module, inputs)


def ops(graph_module: fx.GraphModule) -> list[str]:
    """Return the names of the called ops in order: `all_gather_into_tensor`, `mm`, ..."""
    return [node.target._opname for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def batch(count: int, length: int = 5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(vocab, (count, length), generator=generator) for _ in range(2))  # type: ignore


def tensor_parallel(model: Tiny, mesh: DeviceMesh) -> None:
    """Parallelize `model` by Megatron's plan, with sequence parallelism outside of the linear layers."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    root = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, root)


def fsdp_with_dtensors(model: nn.Module, mesh: DeviceMesh, param_dtype: torch.dtype = torch.float32) -> None:
    """Shard `model` as users write FSDP with DTensors alone: a parameter is gathered where it is read, and its gradient
    is reduce-scattered.

    Parameters that `tensor_parallel` sharded over another mesh are read as DTensors of that mesh.
    """

    def gathered(name: str, outer: DTensor | None) -> property:
        def read(module: nn.Module) -> Tensor:
            whole = module._parameters[f"sharded_{name}"].redistribute(
                placements=[Replicate()], forward_dtype=param_dtype, backward_dtype=torch.float32
            )
            local = whole.to_local(grad_placements=[Partial("avg")])
            if outer is None:
                return local
            return DTensor.from_local(local, outer.device_mesh, outer.placements, run_check=False)

        return property(read)

    for module in list(model.modules()):
        names = [name for name, param in module._parameters.items() if param is not None]
        reads = {}
        for name in names:
            param = module._parameters.pop(name).detach()
            outer = param if isinstance(param, DTensor) else None
            sharded = distribute_tensor(param if outer is None else outer.to_local(), mesh, [Shard(0)])
            module.register_parameter(f"sharded_{name}", nn.Parameter(sharded))
            reads[name] = gathered(name, outer)
        if names:
            kind = type(module)
            module.__class__ = type(f"Gathered{kind.__name__}", (kind,), reads)
