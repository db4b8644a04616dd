"""A step of a small sharded Llama under one system, on torch's fake process group, whose collectives move no data.

The only cost of a collective here is the host time of its launch and its wait. Parameters are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlapc
from benchmarks.kernel_subject import backend_of, copied
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel
from overlapc.warm import watch

SHARDINGS = {"TP": (1, 2), "FSDP": (4, 1), "TP x FSDP": (2, 2)}  # degrees of data parallelism and tensor parallelism
WRAPPED = "overlapc-wrapped"  # overlapc where it must leave the step to AOTAutograd's runtime wrapper
TRUSTING = "overlapc-trusting"  # with overlapc.trust_modules
SHAPE = LlamaConfig(dim=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=64, max_seq=32)


class ShardedSubject:
    """Forward and backward of one model under one system; gradients are dropped after each step."""

    def __init__(self, sharding: str, system: str, device: str) -> None:
        data, tensor = SHARDINGS[sharding]
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        mesh = init_device_mesh(device, (4 // tensor, tensor), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.model = Llama(SHAPE).to(device)
        if tensor > 1:
            tensor_parallel(self.model, mesh["tp"])
        if data > 1:
            for module in (*self.model.layers, self.model):
                overlapc.fully_shard(module, mesh=mesh["dp"])
        # A code object per subject, so that no system sees what Dynamo cached for another one.
        kind = type(self.model)
        self.model.__class__ = type(kind.__name__, (kind,), {"forward": copied(Llama.forward, f"forward_{id(self)}")})
        self.tokens = torch.randint(SHAPE.vocab, (1, SHAPE.max_seq), device=device)
        self.targets = self.tokens.roll(-1, 1)
        self.step: Callable[..., Tensor] = self.model
        if system != "eager":
            name = "overlapc" if system in (WRAPPED, TRUSTING) else system
            options = {"guard_filter_fn": overlapc.trust_modules} if system == TRUSTING else None
            self.step = torch.compile(self.model, backend=backend_of(name), dynamic=False, options=options)
        asked = watch.dtensor_step_metadata
        if system == WRAPPED:
            watch.dtensor_step_metadata = lambda outputs: None
        try:
            for _ in range(3):
                self.both()
        finally:
            watch.dtensor_step_metadata = asked

    def forward(self) -> Tensor:
        return self.step(self.tokens, self.targets)

    def both(self) -> None:
        self.forward().backward()
        self.model.zero_grad(set_to_none=True)
