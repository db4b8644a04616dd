"""The demo job: trains a byte-level Llama on real text, with overlapc and then with eager FSDP2, and compares both.

`overlapc demo` starts `work` on every rank. Both runs begin with the same weights and see the same data;
in fp32 their losses must agree at every step.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

import overlapc
from overlapc import parallel
from overlapc.agreement.departures import RUN_DIR, rank_dir
from overlapc.errors import ConfigError, OverlapcError
from overlapc.launch import corpus
from overlapc.launch.llama import Llama, LlamaConfig, check_tensor_parallel, tensor_parallel
from overlapc.launch.torchrun import check_world
from overlapc.report import measure, report_of_process

FP32_TOLERANCE = 1e-5  # largest relative difference between the losses of both runs at a step
_MEASURED = 3  # steps under the profiler
_WARM_UP = 2  # steps excluded from the step time: the first compiles, the second still fills caches

MODELS: dict[str, Callable[[], LlamaConfig]] = {
    "demo": LlamaConfig,
    "tiny": LlamaConfig.tiny,
    "8b": LlamaConfig.llama_8b,
}


class LossesDiffer(OverlapcError):
    """The losses of the compiled run differ from those of the eager run."""


@dataclass(frozen=True)
class DemoConfig:
    """The arguments of `overlapc demo`. `batch` is rows per data-parallel rank, `seq` tokens per row."""

    nproc: int = 2
    device: str = "cpu"
    dtype: str = "fp32"
    tp: int = 1
    hsdp: int = 1
    steps: int = 12
    batch: int = 4
    seq: int = 256
    reshard: bool = True
    model: str = "demo"
    lr: float = 1e-3
    seed: int = 0
    profile: bool = False

    def check(self) -> None:
        """Raise ConfigError for arguments that cannot run; called before any process starts."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: cpu or cuda")
        if self.dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype {self.dtype}: fp32 or bf16")
        if self.model not in MODELS:
            raise ConfigError(f"--model {self.model}: one of {', '.join(MODELS)}")
        for name in ("steps", "batch", "seq"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: at least 1")
        check_world(self.nproc, self.device, tp=self.tp, hsdp=self.hsdp)
        shape = self.shape()
        check_tensor_parallel(shape, self.tp)
        if self.seq % self.tp:
            raise ConfigError(f"--seq {self.seq} does not divide among --tp {self.tp} ranks")

    def shape(self) -> LlamaConfig:
        """Return the shape of the model, for `seq` positions."""
        return dataclasses.replace(MODELS[self.model](), max_seq=self.seq)

    @property
    def reference(self) -> str:
        """The name of the run that the compiled run is compared with."""
        return "eager FSDP2" if self.sharded else "eager"

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over data-parallel ranks; not if all ranks are tensor-parallel."""
        return self.tp < self.nproc or self.tp == 1

    @property
    def shards(self) -> int:
        """The number of data-parallel ranks that each replica of the parameters is sharded over."""
        return self.nproc // (self.tp * self.hsdp)


@dataclass(frozen=True)
class Run:
    """One training run: the global loss of each step, and how long each step took."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def first_seconds(self) -> float:
        """The time of the first step, which compiles."""
        return self.seconds[0]

    @property
    def step_seconds(self) -> float:
        """The median step time after warm-up."""
        return statistics.median(self.seconds[_WARM_UP:] or self.seconds[-1:])


def work(cfg: DemoConfig, run_dir: Path) -> None:
    """Run the demo on this rank. LossesDiffer if fp32 losses differ by more than FP32_TOLERANCE."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if cfg.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    mesh = init_device_mesh(cfg.device, (cfg.hsdp, cfg.shards, cfg.tp), mesh_dim_names=("replicate", "dp", "tp"))
    try:
        ours = train("overlapc", cfg, mesh, device, rank_dir(run_dir, rank) / "profile.json" if cfg.profile else None)
        overlapc.metrics(tokens=cfg.batch * cfg.seq * cfg.hsdp * cfg.shards)  # for the report
        report = report_of_process()
        for name in ("report.html", "schedule.txt", "record.json"):
            report.save(rank_dir(run_dir, rank) / name)
        gc.collect()  # frees the memory of the first run: sharded modules are in reference cycles
        eager = train(cfg.reference, cfg, mesh, device)
        if rank == 0:
            print(f"\n{report}\n\n{compare(ours, eager, cfg.reference)}\n\nwritten to {run_dir}", flush=True)
        if cfg.dtype == "fp32":
            check_losses(ours, eager)
    finally:
        dist.destroy_process_group()


def train(system: str, cfg: DemoConfig, mesh: DeviceMesh, device: torch.device, profile: Path | None = None) -> Run:
    """Train `cfg.steps` steps of AdamW from the weights of `cfg.seed`, compiled if `system` is "overlapc".

    profile: measure a few more forwards and backwards, and write the profiler's trace to this file.
    """
    with torch.device(device):
        model = Llama(cfg.shape())
    model.reset_parameters(cfg.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if cfg.tp > 1:
        tensor_parallel(model, mesh["tp"])
    shard(system, model, cfg, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    step: Callable[[Tensor, Tensor], Tensor] = model
    if system == "overlapc":
        step = torch.compile(model, backend="overlapc", fullgraph=True)
    # Data-parallel ranks are numbered along both axes; tensor-parallel ranks train on the same rows.
    part = mesh.get_local_rank("replicate") * cfg.shards + mesh.get_local_rank("dp")
    data = corpus.batches(cfg.steps, cfg.batch, cfg.seq, part, cfg.hsdp * cfg.shards, cfg.seed)
    losses, seconds = [], []
    label = f"{system}, {parameters / 1e6:.1f}M parameters"
    bar = tqdm(data, label, cfg.steps, disable=dist.get_rank() != 0, unit="step", file=sys.stderr)
    for tokens, targets in bar:
        began = time.perf_counter()
        loss = step(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(global_mean(loss))  # waits for the device, so that the time below is that of the whole step
        seconds.append(time.perf_counter() - began)
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    if profile is not None:
        with measure(profile):
            for _ in range(_MEASURED):
                step(tokens.to(device), targets.to(device)).backward()
                optimizer.zero_grad()
    return Run(tuple(losses), tuple(seconds))


def shard(system: str, model: Llama, cfg: DemoConfig, mesh: DeviceMesh) -> None:
    """Shard each block, then the other parameters, over the data-parallel axes; in place."""
    policy = MixedPrecisionPolicy()
    if cfg.dtype == "bf16":
        # The rotary tables are inputs of the blocks and must stay fp32.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if not cfg.sharded:
        if cfg.dtype == "bf16":
            model.to(torch.bfloat16)
        return
    axes = mesh["dp"] if cfg.hsdp == 1 else mesh["replicate", "dp"]
    fully_shard = parallel.fully_shard if system == "overlapc" else fsdp.fully_shard
    settings: dict[str, Any] = {"mesh": axes, "mp_policy": policy, "reshard_after_forward": cfg.reshard}
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def global_mean(loss: Tensor) -> float:
    """Return the mean of the losses of all ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def relative(ours: float, eager: float) -> float:
    """Return the relative difference of `ours` from `eager`; infinite if either is not finite."""
    distance = abs(ours - eager) / max(abs(eager), 1e-30)
    return distance if math.isfinite(distance) else math.inf


def compare(ours: Run, eager: Run, reference: str) -> str:
    """Return a table of both runs side by side, for the terminal."""
    rows = [
        (number, f"{mine:.6f}", f"{theirs:.6f}", f"{relative(mine, theirs):.1e}")
        for number, (mine, theirs) in enumerate(zip(ours.losses, eager.losses, strict=True))
    ]
    losses = tabulate(
        rows, ("step", "overlapc loss", f"{reference} loss", "relative difference"), disable_numparse=True
    )
    times = tabulate(
        [
            ("first step (compiles)", f"{ours.first_seconds:.2f} s", f"{eager.first_seconds:.2f} s"),
            ("later steps, median", f"{ours.step_seconds * 1e3:.1f} ms", f"{eager.step_seconds * 1e3:.1f} ms"),
        ],
        ("", "overlapc", reference),
        disable_numparse=True,
    )
    return f"{losses}\n\n{times}"


def check_losses(ours: Run, eager: Run) -> None:
    """Raise LossesDiffer for the first step whose losses differ by more than FP32_TOLERANCE."""
    for number, (mine, theirs) in enumerate(zip(ours.losses, eager.losses, strict=True)):
        if relative(mine, theirs) > FP32_TOLERANCE:
            raise LossesDiffer(
                f"step {number}: loss {mine!r} with overlapc, {theirs!r} eager: "
                f"they differ by {relative(mine, theirs):.1e}, more than {FP32_TOLERANCE:.0e}"
            )


def main(arguments: Sequence[str]) -> None:
    """Entry point of each rank; its argument: the DemoConfig as JSON."""
    work(DemoConfig(**json.loads(arguments[0])), Path(os.environ[RUN_DIR]))


if __name__ == "__main__":
    main(sys.argv[1:])
