"""`overlapc plan --model`: the training step of a model on any number of ranks, planned in one process without a GPU.

The real graph is captured from fake tensors over torch's fake process group, as rank 0 of the job sees it, and goes
through the whole pipeline up to its final schedule on a stored device profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlapc.backend import plan_only
from overlapc.config import Config
from overlapc.errors import ConfigError, unknown_name
from overlapc.garbage import no_collections
from overlapc.launch.demo import DemoConfig, shard
from overlapc.launch.llama import Llama, LlamaConfig, check_tensor_parallel, tensor_parallel
from overlapc.report import record
from overlapc.report.record import Report, StepRecord

AXES = ("replicate", "dp", "tp")  # outermost first: ranks of one `tp` group are neighbours
MODELS: dict[str, Callable[[], LlamaConfig]] = {
    "llama-8b": partial(LlamaConfig.llama_8b, layers=32),
    "demo": LlamaConfig,
    "tiny": LlamaConfig.tiny,
}


@dataclass(frozen=True)
class PlanConfig:
    """A model on a mesh. `batch` is rows a data-parallel rank."""

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
        """Ranks of the job."""
        return self.replicate * self.dp * self.tp

    @classmethod
    def of(
        cls, model: str, mesh: str, world_size: int, seq: int, batch: int, layers: int, dtype: str, reshard: bool
    ) -> PlanConfig:
        """From the command line; ConfigError for what does not fit together. 0 leaves a number to the rest."""
        if model not in MODELS:
            raise ConfigError(unknown_name("model", model, MODELS))
        if dtype not in ("fp32", "bf16"):
            raise ConfigError(f"--dtype {dtype}: fp32 or bf16")
        for name, value in (("seq", seq), ("batch", batch)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: at least 1")
        if layers < 0 or world_size < 0:
            raise ConfigError("--layers and --world-size cannot be negative")
        shape = dataclasses.replace(MODELS[model](), max_seq=seq)
        if layers:
            shape = dataclasses.replace(shape, layers=layers)
        axes = parse_mesh(mesh, world_size)
        check_tensor_parallel(shape, axes["tp"])
        if seq % axes["tp"]:
            raise ConfigError(f"--seq {seq} does not divide among {axes['tp']} tensor-parallel ranks")
        return cls(shape, **axes, seq=seq, batch=batch, dtype=dtype, reshard=reshard)


def parse_mesh(text: str, world_size: int) -> dict[str, int]:
    """`dp=128,tp=8` -> ranks by axis. An axis that is not named has one; `dp` takes what `world_size` leaves."""
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise ConfigError(unknown_name("mesh axis", name, AXES))
        if not size.isdigit() or int(size) < 1 or name in axes:
            raise ConfigError(f"--mesh {text}: write it like dp=128,tp=8, each axis once, at least 1")
        axes[name] = int(size)
    named = 1
    for size_of in axes.values():
        named *= size_of
    if world_size and "dp" not in axes:
        if world_size % named:
            raise ConfigError(f"--world-size {world_size} does not divide into --mesh {text}")
        axes["dp"] = world_size // named
    elif world_size and world_size != named:
        raise ConfigError(f"--mesh {text} has {named} ranks, --world-size says {world_size}")
    return {name: axes.get(name, 1) for name in AXES}


def plan_model(cfg: PlanConfig, options: Config) -> Report:
    """The report of rank 0's forward and backward. ConfigError where a process group exists already."""
    if dist.is_initialized():
        raise ConfigError("planning needs a process of its own: this one has a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.world_size)
    before = len(record.report_of_process().steps[0].graphs)
    torch._dynamo.reset()
    try:
        mesh = init_device_mesh("cpu", (cfg.replicate, cfg.dp, cfg.tp), mesh_dim_names=AXES)
        with FakeTensorMode(allow_non_fake_inputs=True), no_collections():
            model = Llama(cfg.shape)
            if cfg.tp > 1:
                tensor_parallel(model, mesh["tp"])
            how = DemoConfig(cfg.world_size, "cpu", cfg.dtype, cfg.tp, cfg.replicate, reshard=cfg.reshard)
            shard("overlapc", model, how, mesh)
            tokens = torch.zeros(cfg.batch, cfg.seq, dtype=torch.int64)
            step = torch.compile(model, backend=partial(plan_only, options=options), fullgraph=True)
            step(tokens, tokens).backward()
    finally:
        dist.destroy_process_group()
    graphs = record.report_of_process().steps[0].graphs[before:]
    return Report((StepRecord(0, cfg.world_size, graphs),))
