"""What `fully_shard`, `adopt_fsdp2`, `no_sync` and the backend refuse or warn about, and what they suggest instead."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from overlapc.backend import plan_only
from overlapc.errors import CompileError, ConfigError
from overlapc.fx.source import block_of
from overlapc.parallel import MixedPrecisionPolicy, adopt_fsdp2, fully_shard, no_sync
from overlapc.report import record
from tests.parallel.sharded import mesh_1d, shard
from tests.parallel.tiny import Tiny, batch

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


def test_options_that_cannot_be_used_are_refused_with_a_reason():
    mesh = mesh_1d()
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        fully_shard(nn.Linear(4, 4), mesh, reshard_after_forward=3)
    with pytest.raises(ConfigError, match="no forward"):
        fully_shard(nn.ModuleList([nn.Linear(4, 4)]), mesh)
    with pytest.raises(ConfigError, match="list of modules is empty"):
        fully_shard([], mesh)
    with pytest.raises(ConfigError, match="'head' is not a module"):
        fully_shard(["head"], mesh)
    with pytest.raises(ConfigError, match="mesh=4 is not a DeviceMesh"):
        fully_shard(nn.Linear(4, 4), 4)
    with pytest.raises(ConfigError, match="already sharded"):
        fully_shard(fully_shard(nn.Linear(4, 4), mesh), mesh)
    with pytest.raises(ConfigError, match="has 3 axes"):
        fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    with pytest.raises(ConfigError, match="pass one"):
        fully_shard(nn.Linear(4, 4), mesh, mp_policy=policy, param_dtype=torch.bfloat16)
    scalar = nn.Module()
    scalar.weight = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="is a scalar"):
        fully_shard(scalar, mesh)
    with pytest.raises(ConfigError, match="belongs to a LSTM"):
        fully_shard(nn.LSTM(4, 4), mesh)
    two_meshes = nn.Linear(4, 4)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallelize_module(two_meshes, other, ColwiseParallel())
    with pytest.raises(ConfigError, match="slice both from one"):
        fully_shard(two_meshes, mesh)


def test_modules_that_cannot_be_adopted_are_an_error_with_an_alternative():
    mesh = mesh_1d()
    with pytest.raises(ConfigError, match="of this Linear: call it after"):
        adopt_fsdp2(nn.Linear(4, 4))
    adopted = adopt_fsdp2(fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh))
    assert adopt_fsdp2(adopted) is adopted  # a trainer's callback may call it before each training
    with pytest.raises(ConfigError, match="FSDP1's FullyShardedDataParallel"):
        adopt_fsdp2(fsdp2.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"wrapped in DistributedDataParallel.*\(ranks, 1\)"):
        adopt_fsdp2(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    offload = fsdp2.CPUOffloadPolicy(pin_memory=False)
    with pytest.raises(ConfigError, match="leave out offload_policy"):
        adopt_fsdp2(fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=offload))
    with pytest.raises(ConfigError, match="leave out offload_policy"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=offload)
    fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=fsdp2.OffloadPolicy())


@pytest.mark.skipif(not hasattr(_fsdp_param, "_get_orig_param_uid"), reason="torch 2.11's FSDP2 does not notice it")
def test_tied_parameters_that_two_calls_took_are_refused():
    """As accelerate shards T5 and BERT: the tied head by itself, so the gradient of the embedding lacked its uses."""
    mesh, model = mesh_1d(), Tiny(tied=True)
    fsdp2.fully_shard(model.head, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"embed.weight was tied to head.weight|head.weight was tied to embed.weight"):
        adopt_fsdp2(model)


@pytest.fixture
def _first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process rank 0, the only rank that warns."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)


@pytest.mark.usefixtures("_first_rank")
def test_compiling_an_inner_module_alone_is_warned_about():
    model = shard(Tiny())
    with pytest.warns(UserWarning, match=r"compiles a module of a sharded model by itself.*\n.*outermost module"):
        torch.compile(model.layers[1], backend="overlapc")(torch.ones(2, 3, 8))


@pytest.mark.usefixtures("_first_rank")
@pytest.mark.filterwarnings("error:overlapc compiles a module")
@pytest.mark.parametrize("adopt", [False, True])
def test_blocks_that_torch_compile_wraps_are_part_of_the_outermost_graph(adopt):
    """Without the warning, which advises to compile the outermost module."""
    record.clear()
    mesh, model = mesh_1d(), Tiny()
    for at, block in enumerate(model.layers):
        model.layers[at] = torch.compile(block, backend="overlapc")
    for module in (*model.layers, model):
        fsdp2.fully_shard(module, mesh=mesh) if adopt else fully_shard(module, mesh)
    step = torch.compile(adopt_fsdp2(model), backend=partial(plan_only, options={"passes": "none"}), fullgraph=True)
    step(*batch(2))
    (forward,) = record.report_of_process().steps[0].graphs
    assert {"layers.0", "layers.1"} <= {block_of(row.origin) for row in forward.collectives}


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.clamp_(-1, 1),
        lambda weight: weight.detach().t().mul_(2),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: torch.add(weight, 1, out=weight),
        lambda weight: nn.functional.relu(weight, True),
        lambda weight: torch.ops.aten.neg_.default(weight),
    ],
)
def test_a_write_into_a_gathered_parameter_is_refused(write):
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                write(self.weight)
            return super().forward(x)

    model = nn.Sequential(Writes(8, 8))
    fully_shard(model, mesh_1d())
    with pytest.raises(CompileError, match=r"writes into 0.weight, .*\n.*test_fsdp_advice.py:(.|\n)*hint: update the"):
        torch.compile(model, backend="overlapc")(torch.ones(2, 8))


def test_a_write_into_a_copy_of_a_gathered_parameter_is_allowed():
    class Copies(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.clone().clamp_(-1, 1), self.bias.requires_grad_())

    model = fully_shard(Copies(8, 8), mesh_1d())
    assert torch.compile(model, backend="overlapc")(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.usefixtures("_first_rank")
def test_a_module_under_ddp_is_warned_about():
    model = nn.parallel.DistributedDataParallel(Tiny())
    with pytest.warns(
        UserWarning, match=r"is wrapped in DistributedDataParallel: .*\n.*on a mesh of shape \(ranks, 1\)"
    ):
        torch.compile(model, backend="overlapc")(*batch(2))


@pytest.mark.parametrize("around", [False, True])
def test_a_model_of_one_sharded_module_is_not_warned_about(around: bool):
    model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
    fully_shard(model[1], mesh_1d())
    fully_shard(model, mesh_1d())
    step = (lambda x: model(x).sum()) if around else model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(step, backend="overlapc")(torch.ones(2, 8))


def test_no_sync_needs_a_sharded_module_and_accepts_a_compiled_one():
    with pytest.raises(ConfigError, match="this Linear was given to neither"), no_sync(nn.Linear(4, 4)):
        pass
    model = fully_shard(nn.Linear(4, 4), mesh_1d())
    with no_sync(torch.compile(model, backend="eager")):
        assert model._overlapc_unsynced
    assert not model._overlapc_unsynced
