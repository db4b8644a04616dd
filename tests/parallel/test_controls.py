"""FSDP2's methods on modules that our `fully_shard` sharded, on torch's fake process group."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from overlapc.errors import ConfigError
from overlapc.fx.comm.labels import label_of
from overlapc.parallel import FSDPModule, MixedPrecisionPolicy, adopt_fsdp2, fully_shard
from overlapc.parallel.controls import HINTS, REFUSED
from overlapc.parallel.gather import ShardedParam, due
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
    gradient = torch.empty(0)
    found = {name: param.mean(gradient) for name, param in params(model).items()}
    own = [name for name in found if "layers." not in name]
    assert own
    assert {found[name] for name in own} == {("sum", 1.0, 6.0)}
    assert {each for name, each in found.items() if name not in own} == {("sum", 1.0, 4.0)}
    model.set_reduce_scatter_divide_factor(3.0)
    assert {params(model)[name].mean(gradient) for name in own} == {("sum", 1.0, 3.0)}


def test_a_part_of_the_factor_is_applied_before_a_sum_in_fp16():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = fully_shard(Tiny(), mesh, param_dtype=torch.float16)
    model.set_gradient_divide_factor(8.0)
    gradient = torch.empty(0, dtype=torch.float16)
    assert {each.mean(gradient) for each in params(model).values()} == {("sum", 4.0, 2.0)}


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
    factors = {name: each.divisor for name, each in params(model).items()}
    assert {factor for name, factor in factors.items() if "layers.0." in name} == {6.0}
    assert {factor for name, factor in factors.items() if "layers.0." not in name} == {None}


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


class Remembers(nn.Linear):
    def forward(self, x: Tensor, seen: deque[Tensor]) -> Tensor:
        y = super().forward(x)
        seen.append(y)
        return y


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="overlapc")])
def test_an_object_that_a_block_changes_is_the_callers(wrap):
    model = Remembers(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: deque[Tensor] = deque()
    wrap(model)(torch.ones(2, 8), seen)
    assert [each.dtype for each in seen] == [torch.bfloat16]


def test_gradients_of_a_copied_parameter_are_not_held_back_together():
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model.append(copy.deepcopy(model[0]))
    with pytest.raises(ConfigError, match=r"FSDPLinear.weight is a copy of another parameter"):
        model.set_requires_gradient_sync(False)
    model[1].requires_grad_(False)
    model.set_requires_gradient_sync(False)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="overlapc")])
def test_a_parameter_frozen_between_micro_batches_gets_no_more_gradients(wrap):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model.set_requires_gradient_sync(False)
    step = wrap(model)
    step(torch.ones(2, 8)).sum().backward()
    leaf = model[1]._overlapc_unsynced["weight"]
    before = leaf.grad.clone()
    model[1].weight.requires_grad_(False)
    step(torch.ones(2, 8)).sum().backward()
    torch.testing.assert_close(leaf.grad, before, equal_nan=True)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="overlapc")])
def test_gradients_held_back_of_a_parameter_that_was_frozen_since_are_reduced(wrap):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    step = wrap(model)
    model.set_requires_gradient_sync(False)
    step(torch.ones(2, 8)).sum().backward()
    model.set_requires_gradient_sync(True)
    model[1].weight.requires_grad_(False)
    step(torch.ones(2, 8)).sum().backward()
    assert model[1].weight.grad is not None


def test_an_all_reduce_hook_is_refused_also_before_adoption():
    model = nn.Linear(8, 8)
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    model.set_all_reduce_hook(lambda gradient: None)
    with pytest.raises(ConfigError, match="has an all-reduce hook: change gradients between backward and"):
        adopt_fsdp2(model)


def test_a_model_that_does_not_reduce_its_gradients_is_not_adopted():
    model = shard(Tiny(), apply=fsdp2.fully_shard)
    model.layers[0].set_requires_gradient_sync(False)
    with pytest.raises(ConfigError, match=r"layers\.0 does not reduce its gradients now; call adopt_fsdp2 before"):
        adopt_fsdp2(model)
    assert isinstance(model.layers[0], fsdp2.FSDPModule)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("control", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_model_whose_gradients_wait_to_be_reduced_is_not_adopted(control, reduce_dtype):
    model = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    getattr(model, control)(False)
    model(torch.ones(2, 8)).sum().backward()
    getattr(model, control)(True)
    with pytest.raises(ConfigError, match="the model has gradients that FSDP2 has not reduced yet; call adopt_fsdp2"):
        adopt_fsdp2(model)
    model(torch.ones(2, 8)).sum().backward()
    adopt_fsdp2(model)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_control_of_one_module_changes_all_that_were_sharded_with_it(adopted):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    apply = fsdp2.fully_shard if adopted else fully_shard
    apply([model[0], model[1]], mesh=init_device_mesh("cpu", (4,)))
    apply(model, mesh=init_device_mesh("cpu", (4,)))
    if adopted:
        adopt_fsdp2(model)
    model[1].set_gradient_divide_factor(7.0)
    factors = [managed(each)["weight"].divisor for each in model]
    assert factors[0] == factors[1] != factors[2]


def test_a_refused_control_accepts_its_default_by_name():
    model = shard(Tiny())
    model.set_force_sum_reduction_for_comms(enable=False)
    with pytest.raises(ConfigError, match="set_force_sum_reduction_for_comms: not possible"):
        model.set_force_sum_reduction_for_comms(enable=True)


def test_after_an_exception_no_gradient_of_that_backward_is_due():
    model = shard(Tiny())
    key = next(iter(params(model).values())).key
    due[key, id(model.embed.weight)] = torch.ones(())
    model.reset_iter_state()
    assert not due


@pytest.mark.parametrize("change", [("set_reshard_after_forward", True), ("set_gradient_divide_factor", 7.0)])
def test_options_may_change_between_forward_and_backward(change):
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
    key = managed(model)["weight"].key
    loss = model(torch.ones(2, 8)).sum()
    getattr(model, change[0])(change[1])
    loss.backward()
    assert model.weight.grad is not None
    assert managed(model)["weight"].key != key


def test_an_option_set_back_restores_the_first_description():
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=False)
    first = managed(model)["weight"]
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False)
    assert managed(model)["weight"] is first


def test_inference_while_gradients_are_held_back():
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
    model.set_requires_gradient_sync(False)
    with torch.inference_mode():
        assert model(torch.ones(2, 8)).shape == (2, 8)
