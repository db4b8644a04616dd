"""Steps that take DTensors keep the guarantees of AOTAutograd's wrapper without it (on a fake process group)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from overlapc.backend import overlapc as backend
from overlapc.runtime.counters import counted
from overlapc.runtime.step import StepPlan
from tests.runtime.beside_torch import OPTIONS, Compile, error_of, leaf, lean_calls, observed
from tests.worlds import fake_world

SCENARIOS: list[Any] = []


def scenario(function: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
    SCENARIOS.append(pytest.param(function, id=function.__name__))
    return function


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with fake_world(4, rank=1):
        yield


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list to which every call without AOTAutograd's wrapper appends its plan."""
    return lean_calls(monkeypatch)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def parameter(*size: int, on: DeviceMesh, as_: Placement) -> nn.Parameter:
    """Return a leaf DTensor with the given local size."""
    return nn.Parameter(DTensor.from_local(torch.randn(*size), on, [as_], run_check=False))


def seen(tensor: Tensor | None) -> Any:
    """Return comparable metadata and the local values of a DTensor; return other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = tensor._spec
    return (
        spec.mesh.mesh_dim_names,
        str(spec.placements),
        tuple(spec.tensor_meta.shape),
        spec.tensor_meta.stride,
        str(spec.tensor_meta.dtype),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        tensor.to_local().detach().clone(),
    )


def expect_same(ours: Any, theirs: Any) -> None:
    """Assert that both are equal, up to rounding of tensors."""
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            expect_same(one, other)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("run", SCENARIOS)
def test_scenarios_give_the_same_as_under_torchs_wrapper(run: Callable[[Compile], Any], lean: list[StepPlan]):
    ours, expected = observed(run, "overlapc"), observed(run, "aot_eager")
    assert lean, "the step ran under torch's wrapper: nothing was tested"
    expect_same(ours, expected)


# --- gradients


@scenario
def gradients_of_sharded_and_replicated_parameters(compile: Compile) -> Any:
    """Gradients of the replicated parameter are partial sums, as in eager."""
    step = compile(lambda x, w, v: ((x @ w) * v).sum().full_tensor())
    on = mesh()
    w, v = parameter(6, 2, on=on, as_=Shard(1)), parameter(8, on=on, as_=Replicate())
    x = DTensor.from_local(torch.randn(3, 6), on, [Replicate()], run_check=False)
    found = []
    for _ in range(4):  # gradients accumulate
        step(x, w, v).backward()
        found.append((seen(w.grad), seen(v.grad)))
    return found


@scenario
def gradients_that_are_partial(compile: Compile) -> Any:
    step = compile(lambda x, w: (x @ w).to_local().sum())
    on = mesh()
    w = parameter(6, 2, on=on, as_=Replicate())
    found = []
    for _ in range(3):
        x = DTensor.from_local(torch.randn(3, 6), on, [Shard(0)], run_check=False).requires_grad_()
        step(x, w).backward()
        found.append((seen(w.grad), seen(x.grad)))
        w.grad = None
    assert "P" in found[0][0][1]
    return found


@scenario
def uneven_shards(compile: Compile) -> Any:
    """Ten rows over four ranks: this rank has three, the last rank one."""
    step = compile(lambda w: w.full_tensor().square().sum() if w.shape[0] == 10 else w.to_local().sum())
    local = torch.randn(3, 5)
    found = []
    for _ in range(3):
        w = nn.Parameter(
            DTensor.from_local(local, mesh(), [Shard(0)], run_check=False, shape=torch.Size((10, 5)), stride=(5, 1))
        )
        step(w).backward()
        found.append(seen(w.grad)[:-1])  # without the values, which the fake process group makes up
    return found


@scenario
def parameters_without_gradients_and_plain_ones(compile: Compile) -> Any:
    step = compile(lambda w, frozen, plain: (w.to_local() * frozen.to_local() * plain).sum())
    on = mesh()
    w, frozen, plain = parameter(4, on=on, as_=Shard(0)), parameter(4, on=on, as_=Shard(0)), leaf(4)
    frozen.requires_grad_(False)
    for _ in range(3):
        step(w, frozen, plain).backward()
    return seen(w.grad), frozen.grad, plain.grad


@scenario
def gradients_of_one_of_two_parameters(compile: Compile) -> Any:
    step = compile(lambda w, v: (w * v).to_local().sum())
    on = mesh()
    w, v = parameter(4, on=on, as_=Shard(0)), parameter(4, on=on, as_=Shard(0))
    found = []
    for each in (w, v, w, v):
        (grad,) = torch.autograd.grad(step(w, v), [each])
        found.append(seen(grad))
    return found, w.grad, v.grad


@scenario
def the_same_parameter_twice(compile: Compile) -> Any:
    step = compile(lambda w, v: (w * v).to_local().sum())
    w = parameter(4, on=mesh(), as_=Shard(0))
    for _ in range(3):
        step(w, w).backward()
    return seen(w.grad)


@scenario
def hooks_see_dtensors(compile: Compile) -> Any:
    step = compile(lambda w: w.to_local().square().sum())
    w = parameter(4, on=mesh(), as_=Shard(0))
    hooked, accumulated = [], []
    w.register_hook(lambda grad: hooked.append(seen(grad)) or grad * 2)
    w.register_post_accumulate_grad_hook(lambda param: accumulated.append(seen(param.grad)))
    for _ in range(3):
        step(w).backward()
    return hooked, accumulated, seen(w.grad)


@scenario
def inputs_that_are_not_leaves(compile: Compile) -> Any:
    step = compile(lambda x, y: (x * 2).to_local().sum() + y.detach().to_local().sum())
    w, v = parameter(4, on=mesh(), as_=Shard(0)), parameter(4, on=mesh(), as_=Shard(0))
    for _ in range(3):
        step(w.sin(), v.sin()).backward()
    return seen(w.grad), v.grad is None or seen(v.grad)


@scenario
def tangents_in_other_layouts_and_none(compile: Compile) -> Any:
    step = compile(lambda w: (w.to_local() * 2, w.to_local().cos()))
    w = parameter(4, 6, on=mesh(), as_=Shard(0))
    for grad in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.ones(1).expand(4, 6)):
        step(w)[1].backward(grad)
    return seen(w.grad)


@scenario
def retained_graphs_and_second_derivatives(compile: Compile) -> Any:
    step, w = compile(lambda w: (w * w).to_local().sum()), parameter(4, on=mesh(), as_=Shard(0))
    found = []
    for _ in range(3):
        loss = step(w)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(error_of(loss.backward))
        (grad,) = torch.autograd.grad(step(w), w, create_graph=True)
        found.append((isinstance(grad, DTensor), error_of(grad.to_local().sum().backward)))
    return found, seen(w.grad)


# --- what the step was compiled for, and what changes


@scenario
def parameters_on_equal_meshes(compile: Compile) -> Any:
    """The gradient has its parameter's own mesh object if AOTAutograd uses it (torch 2.13)."""
    step = compile(lambda w: w.to_local().square().sum())
    found = []
    for w in [parameter(4, on=mesh(), as_=Shard(0)) for _ in range(4)]:
        step(w).backward()
        found.append((seen(w.grad), w.grad.device_mesh is w.device_mesh))
    return found


@scenario
def other_placements_and_sizes(compile: Compile) -> Any:
    step = compile(lambda w: (w * w).sum().full_tensor())
    found = []
    for rows, as_ in ((4, Shard(0)), (4, Shard(0)), (4, Replicate()), (5, Shard(0)), (4, Replicate()), (5, Shard(0))):
        w = parameter(rows, on=mesh(), as_=as_)
        step(w).backward()
        found.append(seen(w.grad))
    return found


class Product(nn.Module):
    """A module with its own parameter, whose sizes Dynamo treats as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(6, 2, on=mesh(), as_=Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to_local()).sin().sum(1)


@scenario
def activations_of_changing_size(compile: Compile) -> Any:
    model = Product()
    step = compile(model, dynamic=True)
    found = []
    for rows in (3, 5, 7, 4):
        x = leaf(rows, 6)
        step(x).sum().backward()
        found.append((x.grad, seen(model.weight.grad)))
    return found


@scenario
def inputs_that_change(compile: Compile) -> Any:
    """A plain buffer and a DTensor buffer."""

    def function(w: Tensor, count: Tensor, total: Tensor) -> Tensor:
        count.add_(1)
        with torch.no_grad():
            total.add_(w)
        return (w * w).to_local().sum() * count.sum()

    step, w, count = compile(function), parameter(4, on=mesh(), as_=Shard(0)), torch.ones(2)
    total = DTensor.from_local(torch.zeros(4), mesh(), [Shard(0)], run_check=False)
    found = []
    for _ in range(3):
        before = count._version, total._version
        step(w, count, total).backward()
        found.append((count._version > before[0], total._version > before[1]))
    return found, count, seen(total), seen(w.grad)


@scenario
def with_gradients_off_in_between(compile: Compile) -> Any:
    step, w = compile(lambda w: (w * w).to_local().sum()), parameter(4, on=mesh(), as_=Shard(0))
    found = []
    for on in (True, True, False, True, False):
        with torch.set_grad_enabled(on):
            loss = step(w)
        found.append((loss.requires_grad, loss.detach()))
        if on:
            loss.backward()
    return found, seen(w.grad)


@scenario
def backward_in_deterministic_mode(compile: Compile) -> Any:
    step, w = compile(lambda w: w.to_local().sin().sum()), parameter(4, on=mesh(), as_=Shard(0))
    found = []
    for deterministic in (False, False, True):
        loss = step(w)
        torch.use_deterministic_algorithms(deterministic)
        try:
            found.append(error_of(loss.backward))
        finally:
            torch.use_deterministic_algorithms(False)
    return found


@scenario
def under_autocast(compile: Compile) -> Any:
    step = compile(lambda x, w: x @ w.to_local())
    x, w = leaf(3, 6), parameter(6, 2, on=mesh(), as_=Shard(1))
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            result = step(x, w)
        result.sum().backward()
    return result.detach(), seen(w.grad)


# --- where torch's wrapper must stay


def losses(step: Callable[..., Tensor], make: Callable[[], Tensor]) -> list[Any]:
    """Return the loss and the gradient of three calls."""
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        w = make()
        loss = step(w)
        loss.backward()
        found.append((seen(loss.detach()), seen(w.grad)))
    return found


def test_results_that_are_dtensors_are_left_to_torch(lean: list[StepPlan]):
    def function(w: Tensor) -> Tensor:
        return (w * w).sum().redistribute(placements=[Replicate()])

    step = torch.compile(function, backend=backend, options=OPTIONS)
    make = lambda: parameter(4, on=mesh(), as_=Shard(0))  # noqa: E731
    before = counted("steps_under_torchs_wrapper")
    expect_same(losses(step, make), losses(function, make))
    assert not lean
    assert counted("steps_under_torchs_wrapper") == before + 1


def test_other_tensor_subclasses_are_left_to_torch(lean: list[StepPlan]):
    def function(w: Tensor) -> Tensor:
        return (w * 2).sum()

    step = torch.compile(function, backend=backend, options=OPTIONS)
    for _ in range(3):
        w = TwoTensor(torch.ones(4), torch.ones(4)).requires_grad_()
        step(w).backward()
        assert isinstance(w.grad, TwoTensor)
        assert w.grad.a.tolist() == [2.0] * 4
    assert not lean


def test_dtensors_of_symbolic_size_are_left_to_torch(lean: list[StepPlan]):
    step = torch.compile(lambda w: (w * w).to_local().sum(), backend=backend, options=OPTIONS, dynamic=True)
    for rows in (3, 4, 5):
        w = parameter(rows, on=mesh(), as_=Shard(0))
        step(w).backward()
        torch.testing.assert_close(w.grad.to_local(), w.detach().to_local() * 2)
    assert not lean


def test_saved_tensors_hooks_are_left_to_torch(lean: list[StepPlan]):
    step = torch.compile(lambda w: (w * w).to_local().sum(), backend=backend, options=OPTIONS)
    packed: list[Any] = []
    for _ in range(3):
        w = parameter(4, on=mesh(), as_=Shard(0))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: packed.append(saved) or saved, lambda saved: saved):
            step(w).backward()
        torch.testing.assert_close(w.grad.to_local(), w.detach().to_local() * 2)
    assert packed


def test_partial_inputs_have_replicated_gradients():
    """A DTensor input may be a partial sum."""
    step = torch.compile(lambda x: x.redistribute(placements=[Replicate()]).to_local().sum(), backend=backend)
    for _ in range(3):
        x = DTensor.from_local(torch.ones(4), mesh(), [Partial()], run_check=False).requires_grad_()
        step(x).backward()
        assert x.grad.placements == (Replicate(),)
