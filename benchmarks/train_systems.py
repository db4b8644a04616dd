"""One system of train_step.py on one rank: it builds its model and then runs turn by turn.

train_step.py starts it through turns.py. The systems are:

    overlapc, -none, -tuned    ours with the default passes, without passes, and with measured block sizes
    overlapc-nccl, -copy       ours with all collectives by NCCL, or all by copies (transport=)
    overlapc-budget            ours with `--memory-budget`: parameters that fit stay gathered until backward
    overlapc-dtensors          ours on FSDP that is written with DTensors alone, without `fully_shard`
    overlapc-compute           ours without communication: every rank has the whole parameters, in bf16
    eager, compile             FSDP2, and FSDP2 with every block compiled by Inductor
    compile-16ctas, -8ctas     compile with NCCL_MAX_CTAS, which train_step.py sets
    inductor, inductor-*       Inductor on the same in-graph FSDP as ours (inductor_systems.py)
    reference                  eager FSDP2 in fp32; errors are measured against its gradients
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernel_spans import kernel_times, spans_of  # beside this file
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from turns import answer_on_rank, of_all_ranks, step_times

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # FSDP by DTensors is shared with the tests
from tests.parallel.tiny import fsdp_with_dtensors

SYSTEMS = (
    *(
        "overlapc",
        "overlapc-nccl",
        "overlapc-copy",
        "overlapc-budget",
        "overlapc-compute",
        "overlapc-none",
        "overlapc-tuned",
        "overlapc-dtensors",
        "eager",
        "compile",
        "compile-16ctas",
        "compile-8ctas",
    ),
    *("inductor", "inductor-raise", "inductor-sink", "inductor-overlap", "inductor-manual"),
)
REFERENCE = "reference"
OPTIONS: dict[str, dict[str, Any]] = {
    "overlapc": {},
    "overlapc-nccl": {"transport": "nccl"},
    "overlapc-copy": {"transport": "copy"},
    "overlapc-budget": {},  # its budget is an environment variable that train_step.py sets
    "overlapc-compute": {},
    "overlapc-none": {"passes": "none"},
    "overlapc-tuned": {"autotune": True},
    "overlapc-dtensors": {},  # FSDP by DTensors alone, without `fully_shard`
}
MODELS: dict[str, Callable[[argparse.Namespace], LlamaConfig]] = {
    "8b": lambda args: LlamaConfig.llama_8b(args.layers, args.seq),
    "demo": lambda args: LlamaConfig(max_seq=args.seq),
    "tiny": lambda args: LlamaConfig(dim=64, layers=args.layers, heads=4, kv_heads=2, ffn=128, max_seq=args.seq),
}
Step = Callable[[Tensor, Tensor], Tensor]


def shape_of(args: argparse.Namespace) -> LlamaConfig:
    """Return the shape of the model that `--model`, `--layers`, `--seq` and `--vocab` ask for."""
    shape = MODELS[args.model](args)
    return shape if args.vocab is None else replace(shape, vocab=args.vocab)


class System:
    """A system's model and data on this rank; every public method is a turn, whose result is what it returns."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        """folder: where the reference saves its gradients for the other systems; reports go to `args.out`."""
        self.name, self.args, self.folder = name, args, folder
        self.rank = dist.get_rank()
        sizes = (dist.get_world_size() // args.tp, args.tp)
        self.mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("dp", "tp"))
        shape = shape_of(args)
        torch.manual_seed(1 + self.rank // args.tp)  # ranks that share layers see the same tokens
        self.tokens = torch.randint(0, shape.vocab, (args.batch, args.seq), device=args.device)
        self.targets = self.tokens.roll(-1, 1)
        self.shape = shape

    def build(self) -> dict[str, Any]:
        """Build the sharded model; it compiles at its first step."""
        self.model = build(self.name, self.shape, self.mesh)
        self.step = compiled(self.name, self.model)
        self.optimizer: torch.optim.Optimizer | None = None
        if self.args.adamw:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        return {}

    def first(self) -> dict[str, Any]:
        """Run the first step, which compiles; return its loss, and the gradients' errors with `--parity`."""
        began = time.perf_counter()
        loss = self.step(self.tokens, self.targets)
        loss.backward()
        result = {"first_step_s": time.perf_counter() - began, "loss": loss.item()}
        kept = self.folder / f"reference_{self.rank}.pt"
        if self.args.parity:
            grads = [local(parameter.grad).float() for parameter in self.model.parameters()]
            if self.name == REFERENCE:
                torch.save((result["loss"], grads), kept)
            else:
                reference_loss, reference = torch.load(kept, map_location=self.tokens.device)
                result |= errors(grads, reference)
                result["loss_error"] = abs(result["loss"] - reference_loss) / abs(reference_loss)
        self.model.zero_grad(set_to_none=True)
        return result

    def time(self) -> dict[str, Any]:
        """Return the milliseconds of each step, by CUDA events or the host's clock, and this GPU's peak memory.

        Also the median of the slowest rank: without communication ranks do not wait for each other.
        """
        found = step_times(self.once, self.args.steps, self.args.device)
        return found | {"slowest_ms": max(of_all_ranks(statistics.median(found["times_ms"])))}

    def profile(self) -> dict[str, Any]:
        """Return kernel times per step, and of all ranks those of the one that waits least, which others wait for.

        Ours also saves its record, with every node's measured and predicted time.
        """
        out: Path | None = self.args.out
        if self.name.startswith("overlapc"):
            with overlapc.report.measure():
                for _ in range(3):
                    self.once()
            if out is not None and self.rank == 0:
                overlapc.report().save(out / f"record_{self.name}.json")
                (out / f"report_{self.name}.txt").write_text(str(overlapc.report()))
        if self.args.device == "cpu":
            return {}
        spans = spans_of(self.once)
        if out is not None:
            (out / f"kernels_{self.name}_{self.rank}.json").write_text(json.dumps(spans))
        ranks = of_all_ranks(kernel_times(spans))
        busiest = min(ranks, key=lambda times: times["exposed_ms"] + times["idle_ms"])
        return ranks[0] | {f"busiest_rank_{name}": busiest[name] for name in ("compute_ms", "exposed_ms", "idle_ms")}

    def once(self) -> None:
        """Run one step, with the optimizer if `--adamw` asks for it."""
        self.step(self.tokens, self.targets).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def build(system: str, shape: LlamaConfig, mesh: DeviceMesh) -> Llama:
    """Return the model sharded for `system`; bf16 compute, fp32 reduction (the reference: fp32 throughout).

    mesh: its axis "dp" shards parameters; an axis "tp" divides every layer among its ranks.
    """
    with torch.device(mesh.device_type):
        model = Llama(shape)
    model.reset_parameters(0)
    with torch.no_grad():  # all systems get the same rounded weights, so that errors come from the computation only
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    if "tp" in (mesh.mesh_dim_names or ()):
        if mesh["tp"].size() > 1:
            tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    if mesh.size() == 1 or system == "overlapc-compute":
        if system != REFERENCE:
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
        return model
    if system == "overlapc-dtensors":
        fsdp_with_dtensors(model, mesh, torch.bfloat16)
        return model
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if system == REFERENCE:
        policy = MixedPrecisionPolicy()
    by_hooks = system in (REFERENCE, "eager") or system.startswith("compile")
    shard = fsdp.fully_shard if by_hooks else overlapc.fully_shard
    for layer in model.layers:
        if system.startswith("compile"):
            layer.compile()
        shard(layer, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    return model


def compiled(system: str, model: Llama) -> Step:
    if system in OPTIONS:
        return torch.compile(model, backend="overlapc", fullgraph=True, options=OPTIONS[system])
    if system.startswith("inductor"):
        from inductor_systems import compiled_by_inductor  # beside this file; other systems do not import Inductor

        return compiled_by_inductor(system, model)
    if system.startswith("compile") and not isinstance(model, FSDPModule):  # an FSDP2 model is compiled by blocks
        return torch.compile(model, fullgraph=True)
    return model


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def errors(grads: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Return the relative errors of the gradients: of all together, and of the worst parameter."""
    each = [((a - b).norm() / b.norm()).item() for a, b in zip(grads, reference, strict=True)]
    whole = sum((a - b).square().sum().item() for a, b in zip(grads, reference, strict=True))
    norm = sum(b.square().sum().item() for b in reference)
    return {"grad_error": (whole / norm) ** 0.5, "worst_grad_error": max(each)}


def serve(args: argparse.Namespace, folder: Path, name: str, rank: int, ranks: int, port: int) -> None:
    """Run a rank of a system: take turns until there are no more, or until an error ends it."""
    answer_on_rank(lambda: System(name, args, folder), args.device, name, rank, ranks, port)
