"""FSDP2's methods on modules that our `fully_shard` sharded, on torch's fake process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from overlapc.errors import ConfigError
from overlapc.fx.comm.labels import label_of
from overlapc.parallel import FSDPModule, adopt_fsdp2, fully_shard
from overlapc.parallel.controls import HINTS, REFUSED
from overlapc.parallel.gather import ShardedParam
from overlapc.parallel.unreduced import managed
from tests.parallel.sharded import shard
from tests.parallel.tiny import Recorder, Tiny, batch

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


def recomputed(model: nn.Module, step=None) -> set[str]:
    """Return the parameters that the backward graph gathers again."""
    recorder = Recorder()
    step = torch.compile(model, backend=recorder, fullgraph=True)
    step(*batch(2)).backward()
    gathers = [node for node in recorder.backward[-1].graph.nodes if "all_gather" in str(node.target)]
    return {label_of(node).param for node in gathers}


def params(model: nn.Module) -> dict[str, ShardedParam]:
    return {f"{path}.{name}": each for path, module in model.named_modules() for name, each in managed(module).items()}


def test_reshard_after_forward_may_be_changed():
    model = shard(Tiny())
    before = recomputed(model)
    assert any(name.startswith("layers.0.") for name in before)
    model.layers[0].set_reshard_after_forward(False)
    assert {name for name in before if not name.startswith("layers.0.")} == recomputed(model)
    model.set_reshard_after_forward(False)
    assert recomputed(model) == set()
    model.set_reshard_after_forward(True, recurse=False)
    assert recomputed(model)
    assert not any(name.startswith("layers.") for name in recomputed(model))


def test_a_compiled_model_is_compiled_again_after_a_change():
    model, recorder = shard(Tiny()), Recorder()
    step = torch.compile(model, backend=recorder, fullgraph=True)
    for _ in range(2):
        step(*batch(2)).backward()
    assert len(recorder.forward) == 1
    model.set_gradient_divide_factor(7.0, recurse=True)
    step(*batch(2)).backward()
    assert len(recorder.forward) == 2
    assert "7.0" in recorder.backward[1].code
    assert "7.0" not in recorder.backward[0].code


def test_gradients_are_divided_by_the_users_factor():
    model = shard(Tiny())
    model.set_gradient_divide_factor(6.0)
    found = {name: (param.reduce_op, param.divide_before, param.divide_after) for name, param in params(model).items()}
    own = [name for name in found if "layers." not in name]
    assert own
    assert {found[name] for name in own} == {("sum", 1.0, 6.0)}
    assert {each for name, each in found.items() if name not in own} == {("sum", 1.0, 4.0)}
    model.set_reduce_scatter_divide_factor(3.0)
    assert {params(model)[name].divide_after for name in own} == {3.0}


def test_a_part_of_the_factor_is_applied_before_a_sum_in_fp16():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = fully_shard(Tiny(), mesh, param_dtype=torch.float16)
    model.set_gradient_divide_factor(8.0)
    assert {(each.divide_before, each.divide_after) for each in params(model).values()} == {(4.0, 2.0)}


def test_tied_parameters_stay_tied():
    model = shard(Tiny(tied=True))
    model.set_gradient_divide_factor(6.0, recurse=True)
    assert len({id(each) for each in params(model).values()}) < len(params(model))
    assert recomputed(model)


def test_a_factor_must_be_positive():
    with pytest.raises(ConfigError, match="0 is not a positive number"):
        shard(Tiny()).set_gradient_divide_factor(0)


@pytest.mark.parametrize("change", ["set_reshard_after_forward", "set_gradient_divide_factor"])
def test_nothing_changes_while_gradients_wait_to_be_reduced(change: str):
    model = shard(Tiny())
    model.set_requires_gradient_sync(False)
    with pytest.raises(ConfigError, match=f"{change}: gradients of this .* are not reduced yet"):
        getattr(model, change)(True)


def test_an_adopted_model_keeps_its_factor():
    model = shard(Tiny(), apply=fsdp2.fully_shard)
    model.layers[0].set_gradient_divide_factor(6.0)
    model = adopt_fsdp2(model)
    factors = {name: each.divide_after for name, each in params(model).items()}
    assert {factor for name, factor in factors.items() if "layers.0." in name} == {6.0}
    assert {factor for name, factor in factors.items() if "layers.0." not in name} == {4.0}


def test_all_methods_of_fsdp2_exist():
    """Each method works, is an ignored hint, or raises an error that says what to do instead."""
    theirs = {name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")}
    # reset_iter_state resets FSDP2's hooks, which overlapc does not have.
    assert theirs - {"reset_iter_state"} <= set(dir(FSDPModule))
    model = shard(Tiny())
    for name in HINTS:
        assert getattr(model, name)(True) is None
    for name in REFUSED:
        with pytest.raises(ConfigError, match=f"{name}: not possible in a compiled graph; "):
            getattr(model, name)(True)
    assert model.reshard() is None


class ReadsItsPolicy(nn.Module):
    """Casts its input as models of NeMo Automodel do, whose head must get what it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.to(self.head._get_fsdp_state()._mp_policy.param_dtype))


@pytest.mark.parametrize("adopted", [False, True], ids=["fully_shard", "adopted"])
def test_a_model_may_read_its_mixed_precision_policy(adopted: bool):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model, by = ReadsItsPolicy(), fsdp2.fully_shard if adopted else fully_shard
    by(model.head, mesh=mesh, mp_policy=policy)
    by(model, mesh=mesh, mp_policy=policy)
    model = adopt_fsdp2(model) if adopted else model
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for call in (model, step):
        assert call(torch.randn(4, 8)).dtype == torch.bfloat16
