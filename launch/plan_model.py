"""`overlapc plan --model`: plans the training step of a model on any number of ranks in one process without a GPU.

The graph is captured with fake tensors and torch's fake process group, as rank 0 of the job sees it, and goes through
the whole pipeline up to its final schedule on a stored device profile. If a model has many layers, models of a few
layers are traced, and the schedule is extrapolated from theirs (schedule/repeat.py), if those for three numbers of
layers are consistent. An effect that depends on the distance between layers (a fusion of the first with the last)
is assumed to be the same in the large model.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.backend import plan_only, schedule_only
from overlapc.compilation.plan_only import plan_schedules
from overlapc.compilation.preparation import prepare_torch
from overlapc.config import Config
from overlapc.errors import ConfigError, unknown_name
from overlapc.gc_paused import gc_paused
from overlapc.launch.demo import DemoConfig, shard
from overlapc.launch.llama import Llama, LlamaConfig, check_tensor_parallel, tensor_parallel
from overlapc.launch.sweep import MOST_RANKS
from overlapc.parallel import FSDPModule
from overlapc.passes.base import Context
from overlapc.planning.chosen_profile import profile_of
from overlapc.report import record
from overlapc.report.model import StepRecord
from overlapc.report.record import Report
from overlapc.schedule.model import Schedule
from overlapc.schedule.repeat import Irregular, repeated
from overlapc.units import parse_count

AXES = ("replicate", "dp", "tp")  # outermost first: ranks of one `tp` group are neighbours
MODELS: dict[str, Callable[[], LlamaConfig]] = {
    "llama-8b": partial(LlamaConfig.llama_8b, layers=32),
    "llama-70b": LlamaConfig.llama_70b,
    "demo": LlamaConfig,
    "tiny": LlamaConfig.tiny,
}
# Numbers of layers of the models that are traced for a larger one. The first and last layers differ from those in
# between, so the smallest has one layer of each sort. A model with at most the sum of these is traced itself.
FEW = (3, 4, 5)
_MOST_TOKENS = 2**24  # limit of tokens per row, and of rows
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class PlanConfig:
    """A model on a mesh. `batch` is the number of rows per data-parallel rank."""

    shape: LlamaConfig
    replicate: int = 1
    dp: int = 1
    tp: int = 1
    seq: int = 4096
    batch: int = 1
    dtype: str = "bf16"
    reshard: bool = True

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.replicate * self.dp * self.tp

    @classmethod
    def of(
        cls, model: str, mesh: str, world_size: int, seq: int, batch: int, layers: int, dtype: str, reshard: bool
    ) -> PlanConfig:
        """Return the plan for arguments of the command line; ConfigError if they are invalid together.

        world_size: 0 for the number of ranks of `mesh`. layers: 0 for all layers of the model.
        """
        if model not in MODELS:
            raise ConfigError(unknown_name("model", model, MODELS))
        if dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype {dtype}: fp32 or bf16")
        for name, value in (("seq", seq), ("batch", batch)):
            if not 1 <= value <= _MOST_TOKENS:
                raise ConfigError(f"--{name} {value}: from 1 to {_MOST_TOKENS}")
        if not 0 <= layers <= _MOST_LAYERS:
            raise ConfigError(f"--layers {layers}: from 0 (all layers of the model) to {_MOST_LAYERS}")
        if world_size < 0:
            raise ConfigError("--world-size cannot be negative")
        shape = dataclasses.replace(MODELS[model](), max_seq=seq)
        if layers:
            shape = dataclasses.replace(shape, layers=layers)
        axes = parse_mesh(mesh, world_size)
        check_tensor_parallel(shape, axes["tp"])
        if seq % axes["tp"]:
            raise ConfigError(f"--seq {seq} does not divide among {axes['tp']} tensor-parallel ranks")
        return cls(shape, **axes, seq=seq, batch=batch, dtype=dtype, reshard=reshard)


def parse_mesh(text: str, world_size: int) -> dict[str, int]:
    """Parse `dp=128,tp=8` to ranks by axis. Axes that are not given have one rank, except `dp` with a `world_size`: it
    gets the remaining ranks."""
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise ConfigError(unknown_name("mesh axis", name, AXES))
        if name in axes:
            raise ConfigError(f"--mesh: {name} is given twice")
        try:
            axes[name] = parse_count(size, MOST_RANKS)
        except ConfigError as error:
            raise ConfigError(f"--mesh: {name}: {error}; write it like dp=128,tp=8") from None
        if not axes[name]:
            raise ConfigError(f"--mesh: {name}=0: at least 1")
    named = 1
    for size_of in axes.values():
        named *= size_of
    if world_size and "dp" not in axes:
        if world_size % named:
            raise ConfigError(f"--world-size {world_size} does not divide into --mesh {text}")
        axes["dp"] = world_size // named
    elif world_size and world_size != named:
        raise ConfigError(f"--mesh {text} has {named} ranks, --world-size says {world_size}")
    if max(named, world_size) > MOST_RANKS:
        raise ConfigError(f"{max(named, world_size):,} ranks: a plan can have at most {MOST_RANKS:,}")
    return {name: axes.get(name, 1) for name in AXES}


def plan_model(cfg: PlanConfig, options: Config, *, whole: bool = False) -> Report:
    """Plan a training step. Return the report of rank 0's forward and backward.

    whole: trace every layer, however many there are. ConfigError if this process already has a process group.
    """
    if dist.is_initialized():
        raise ConfigError("planning needs a separate process: this one already has a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.world_size)
    before = len(record.report_of_process().steps[0].graphs)
    try:
        mesh = init_device_mesh("cpu", (cfg.replicate, cfg.dp, cfg.tp), mesh_dim_names=AXES)
        if whole or cfg.shape.layers <= sum(FEW) or not _plan_from_few(cfg, options, mesh):
            _trace(cfg, options, mesh, partial(plan_only, options=options))
    finally:
        dist.destroy_process_group()
    graphs = record.report_of_process().steps[0].graphs[before:]
    tokens = cfg.seq * cfg.batch * cfg.replicate * cfg.dp
    return Report((StepRecord(0, cfg.world_size, graphs, tokens=tokens),))


def _plan_from_few(cfg: PlanConfig, options: Config, mesh: DeviceMesh) -> bool:
    """Plan forward and backward by extrapolating from models of few layers; False, with a warning, if that fails."""
    found = [_schedules(cfg, layers, options, mesh) for layers in FEW]
    planned: list[tuple[Schedule, Context]] = []
    try:
        for same in zip(*found, strict=True):  # the forwards of the models of few layers, then their backwards
            schedules = {layers: schedule for layers, (schedule, _) in zip(FEW, same, strict=True)}
            planned.append((repeated(schedules, cfg.shape.layers), same[0][1]))
    except Irregular as why:
        warnings.warn(
            f"all {cfg.shape.layers} layers are traced, which takes longer, because their schedule cannot be"
            f" extrapolated from models of {', '.join(map(str, FEW))} layers: {why}",
            stacklevel=3,
        )
        return False
    forward, backward = planned
    plan_schedules(forward, backward, options)
    return True


def _schedules(cfg: PlanConfig, layers: int, options: Config, mesh: DeviceMesh) -> list[tuple[Schedule, Context]]:
    """Return the schedules of forward and backward of the model with `layers` layers, before the passes."""
    found: list[tuple[Schedule, Context]] = []
    few = dataclasses.replace(cfg, shape=dataclasses.replace(cfg.shape, layers=layers))
    _trace(few, options, mesh, partial(schedule_only, options=options, on_schedule=lambda *graph: found.append(graph)))
    return found


def _trace(cfg: PlanConfig, options: Config, mesh: DeviceMesh, backend: Callable[..., Any]) -> None:
    """Compile forward and backward of the model with `backend`, on fake tensors."""
    torch._dynamo.reset()
    no_collection = torch._dynamo.config.patch(run_gc_after_compile=False)  # Dynamo's, after each compile
    with FakeTensorMode(allow_non_fake_inputs=True), gc_paused(), no_collection:
        model = Llama(cfg.shape)
        if cfg.tp > 1:
            tensor_parallel(model, mesh["tp"])
        how = DemoConfig(cfg.world_size, "cpu", cfg.dtype, cfg.tp, cfg.replicate, reshard=cfg.reshard)
        shard("overlapc", model, how, mesh)
        if isinstance(model, FSDPModule) and not profile_of(options, {"cpu"}).synchronous:
            model.set_gradient_divide_factor(1.0, recurse=True)  # on GPUs, NCCL averages and no kernel divides
        tokens, targets = (torch.zeros(cfg.batch, cfg.seq, dtype=torch.int64) for _ in range(2))
        prepare_torch(options)
        step = torch.compile(model, backend=backend, fullgraph=True)
        step(tokens, targets).backward()
