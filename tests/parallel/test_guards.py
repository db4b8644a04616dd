"""Models compiled with `trust_modules`: changes for which Dynamo still recompiles, and changes that a step refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlapc
from overlapc.backend import overlapc as backend
from overlapc.runtime.support import LayoutError

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


class Counting:
    """The overlapc backend, with a count of the graphs that Dynamo gave it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.graphs += 1
        return backend(gm, inputs, options={"warm_start": False, "native": False})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu())).sum()


def model() -> nn.Module:
    """Return a tensor-parallel model; on the fake process group its all-reduce returns this rank's terms."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    made = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    generator = torch.Generator().manual_seed(0)
    for param in made.parameters():  # the fake process group scattered no values
        param.detach().to_local().normal_(generator=generator)
    return made


def trusting(module: nn.Module) -> tuple[Callable[[], Tensor], Counting]:
    """Compile `module` with trust_modules and run three training steps; return the step and the graph counter."""
    counting = Counting()
    compiled = torch.compile(module, backend=counting, options={"guard_filter_fn": overlapc.trust_modules})

    def step() -> Tensor:
        loss = compiled(torch.ones(2, 8))
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    for _ in range(3):
        step()
    assert counting.graphs == 1
    return step, counting


def test_steps_see_what_the_optimizer_changes():
    ours, theirs = model(), model()
    step, counting = trusting(ours)
    eager = torch.compile(theirs, backend="aot_eager")
    for module, each in ((ours, step), (theirs, lambda: eager(torch.ones(2, 8)).backward())):
        module.zero_grad()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            each()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local())
    assert counting.graphs == 1


def turn_dropout_off(module: nn.Module) -> None:
    module.eval()


def add_a_hook(module: nn.Module) -> None:
    module.up.register_forward_hook(lambda module, args, result: result * 2)


def replace_a_module(module: nn.Module) -> None:
    module.drop = nn.Identity()


@pytest.mark.parametrize("change", [turn_dropout_off, add_a_hook, replace_a_module])
def test_dynamo_recompiles_after_changes_of_modules(change: Callable[[nn.Module], None]):
    module = model()
    step, counting = trusting(module)
    before = step()
    change(module)
    after = step()
    assert counting.graphs == 2
    assert (after == before) == (change is not add_a_hook)


def freeze(module: nn.Module) -> None:
    module.up.weight.requires_grad_(False)


def replace(module: nn.Module, make: Callable[[Tensor], Tensor], placement: Placement) -> None:
    weight = module.up.weight
    local = make(weight.to_local().detach())
    module.up.weight = nn.Parameter(DTensor.from_local(local, weight.device_mesh, [placement], run_check=False))


def convert(module: nn.Module) -> None:
    replace(module, Tensor.double, Shard(0))


def replicate(module: nn.Module) -> None:
    replace(module, Tensor.clone, Replicate())


@pytest.mark.parametrize(
    ("change", "named"), [(freeze, "requires_grad=False"), (convert, "torch.float64"), (replicate, "Replicate()")]
)
def test_a_step_refuses_a_parameter_of_another_kind(change: Callable[[nn.Module], None], named: str):
    module = model()
    step, counting = trusting(module)
    change(module)
    with pytest.raises(LayoutError, match=r"is a DTensor .*, but the step was compiled for") as raised:
        step()
    assert named in str(raised.value)
    assert counting.graphs == 1


def test_a_step_compiled_again_accepts_the_changed_parameter():
    module = model()
    step, counting = trusting(module)
    freeze(module)
    torch._dynamo.reset()
    module.zero_grad()
    step()
    assert module.up.weight.grad is None
    assert counting.graphs == 2


def test_without_trust_modules_dynamo_recompiles():
    module, counting = model(), Counting()
    compiled = torch.compile(module, backend=counting)
    for _ in range(3):
        compiled(torch.ones(2, 8)).backward()
    freeze(module)
    module.zero_grad()
    compiled(torch.ones(2, 8)).backward()
    assert module.up.weight.grad is None
    assert counting.graphs == 2
