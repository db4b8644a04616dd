"""A forward that is not one graph gathers its module's parameters at its begin, whatever it reads on which rank."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overlapc
import overlapc.parallel
from overlapc.parallel.gathered import Forward
from overlapc.parallel.unreduced import managed
from tests.ranks import take_gpu, values_on_ranks

WIDTH, EXPERTS = 8, 4


class Stacked(nn.Module):
    """Experts in one parameter, like those of transformers; a loop over those that this rank's tokens chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in chosen.unique():
            rows = (chosen == expert).nonzero()[:, 0]
            result = result.index_add(0, rows, F.linear(tokens[rows], self.weight[expert]))
        return result


class Listed(nn.Module):
    """Experts as modules of equal form, of which a rank calls only those that its tokens chose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts):
            rows = chosen == at
            if rows.any():
                result = result.masked_scatter(rows[:, None], expert(tokens[rows]))
        return result


class Broken(nn.Module):
    """A layer with a graph break in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.aside: Tensor | None = None

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        hidden = self.up(tokens).relu()
        torch._dynamo.graph_break()
        self.aside = hidden.square().mean() * self.down.weight.square().mean()
        return tokens + self.down(hidden)


class CallsItself(Broken):
    """A layer whose condition is its own result without gradients, as diffusion models are trained."""

    def forward(self, tokens: Tensor, chosen: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is None:
            with torch.no_grad():
                condition = self(tokens, chosen, torch.zeros_like(tokens))
        return super().forward(tokens + condition, chosen)


class CheckpointsPart(Broken):
    """A layer that computes a part of itself again in backward."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        hidden = self.up(tokens).relu()
        torch._dynamo.graph_break()
        result: Tensor = checkpoint(lambda hidden: self.down(hidden).relu(), hidden, use_reentrant=True)
        return tokens + result


class EnablesGradients(Broken):
    """A layer that has gradients, whoever calls it."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        with torch.enable_grad():
            self.result = super().forward(tokens, chosen)
        return self.result


class ReturnsView(Broken):
    """A layer that returns a view, which a caller may change in place."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(tokens, chosen).sin().t()


class ReturnsArgument(Broken):
    """A layer that also returns what it was given, as Hugging Face's models return all hidden states."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Any:
        return tokens, super().forward(tokens, chosen)


class OnOneRank(Broken):
    """A layer whose parameters one rank does not use, as if none of its tokens needed them."""

    def forward(self, tokens: dict[str, Tensor], chosen: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(tokens["tokens"], chosen) if dist.get_rank() == 0 else tokens["tokens"] * 1


class Threads(Broken):
    """A layer that calls its modules in other threads."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.down(self.up(tokens).relu())))
        thread.start()
        thread.join()
        return found[0]


class Sliced(nn.Module):
    """A layer that slices a list of parameters, asks for one that was deleted, and makes another module like itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        for weight in self.weights[1:]:
            tokens = F.linear(tokens, weight).relu()
        other = type(self)() if not torch.compiler.is_compiling() else None
        assert other is None or type(other.scale) is nn.Parameter
        return F.linear(tokens, self.weights[0]) * self.scale


class Net(nn.Module):
    """Two layers of one kind, and a head."""

    def __init__(self, layer: type[nn.Module], how: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.order = [0, 1]

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        for layer in map(self.layers.__getitem__, self.order):
            tokens = layer(tokens, chosen) if self.how is None else self.how(layer, tokens, chosen)
        return self.head(tokens)

    def generate(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        for _ in range(3):
            tokens = self(tokens, chosen)
        return tokens


def data() -> tuple[Tensor, Tensor]:
    rank, device = dist.get_rank(), torch.get_default_device()
    tokens = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank), device="cpu").to(device)
    return tokens, torch.tensor([[0, 1, 2, 0], [1, 1, 1, 1]][rank])  # no rank chooses expert 3


def steps(model: Any, net: Net) -> None:
    for _ in range(2):
        model(*data()).square().mean().backward()


def in_other_orders(model: Any, net: Net) -> None:
    for net.order in [0, 1], [0, 1], [1], [1, 0], [0, 0, 1]:
        model(*data()).square().mean().backward()


def evaluation_between(model: Any, net: Net) -> None:
    loss = model(*data()).square().mean()
    with torch.no_grad():
        model(*data())
    loss.backward()


def both_at_once(model: Any, net: Net) -> None:
    tokens, chosen = data()
    (model(tokens, chosen) * model(tokens.flip(0), chosen)).mean().backward()


def one_after_the_other(model: Any, net: Net) -> None:
    tokens, chosen = data()
    losses = [model(each, chosen).square().mean() for each in (tokens, tokens.flip(0))]
    for loss in losses:
        loss.backward()


def with_loss_aside(model: Any, net: Net) -> None:
    loss = model(*data()).square().mean()
    (loss + sum(layer.aside for layer in net.layers)).backward()


def changed_without_backward(model: Any, net: Net) -> None:
    """Change parameters between two forwards, of which the first has no backward but is still referred to."""
    unused = model(*data())
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.5)
            param.data.mul_(0.5)
    steps(model, net)
    del unused


def twice(model: Any, net: Net) -> None:
    loss = model(*data()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalized(model: Any, net: Net) -> None:
    tokens, chosen = data()
    (grad,) = torch.autograd.grad(model(tokens.requires_grad_(), chosen).sum(), tokens, create_graph=True)
    grad.square().mean().backward()


def frozen(model: Any, net: Net) -> None:
    net.layers.requires_grad_(False)
    tokens, chosen = data()
    model(tokens.requires_grad_(), chosen).square().mean().backward()


def accumulated(model: Any, net: Net) -> None:
    """Reduce the gradients of three micro-batches at once."""
    for last in (False, False, True):
        if isinstance(net, overlapc.parallel.FSDPModule):
            net.set_requires_gradient_sync(last)
        model(*data()).square().mean().backward()


def without_outer_gradients(model: Any, net: Net) -> None:
    with torch.no_grad():
        model(*data())
    sum(layer.result.square().mean() for layer in net.layers).backward()


def of_trained_tokens(model: Any, net: Net) -> None:
    """Also train the tokens, over several steps that change the parameters, too."""
    tokens, chosen = data()
    tokens.requires_grad_()
    for _ in range(2):
        model(tokens, chosen).square().mean().backward()
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)


def collected(model: Any, net: Net) -> None:
    """Let Python's garbage collector run on one rank only."""
    for _ in range(2):
        loss = model(*data()).square().mean()
        if dist.get_rank():
            gc.collect()
        loss.backward()


def generated(model: Any, net: Net) -> None:
    """Call the model from a method that counts as a forward of its own."""
    if isinstance(net, overlapc.parallel.FSDPModule):
        register_fsdp_forward_method(net, "generate")
    for _ in range(2):
        net.generate(*data()).square().mean().backward()


def replaced_for_evaluation(model: Any, net: Net) -> None:
    """Evaluate with other parameters between a forward and its backward."""
    loss = model(*data()).square().mean()
    places = [layer.up._parameters for layer in net.layers]
    kept = [place["weight"] for place in places]
    for place in places:
        place["weight"] = nn.Parameter(place["weight"].detach() * 0.5)
    with torch.no_grad():
        model(*data())
    for place, weight in zip(places, kept, strict=True):
        place["weight"] = weight
    loss.backward()


def with_hooks(model: Any, net: Net) -> None:
    """Change gradients where they arrive and once they have been accumulated, as optimizers within backward do."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in net.parameters():
        param.register_hook(lambda grad: grad * 3)
        param.register_post_accumulate_grad_hook(halve)
    steps(model, net)


def reentrant(layer: nn.Module, tokens: Tensor, chosen: Tensor) -> Tensor:
    return checkpoint(layer, tokens, chosen, use_reentrant=True)


def added_in_place(layer: nn.Module, tokens: Tensor, chosen: Tensor) -> Tensor:
    result: Tensor = layer(tokens, chosen)
    result += 1
    return result.t()


def second(layer: nn.Module, tokens: Tensor, chosen: Tensor) -> Tensor:
    result: Tensor = layer(tokens, chosen)[1]
    return result


def twice_in_dict(layer: nn.Module, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Call the layer twice, with arguments that have a gradient."""
    for _ in range(2):
        tokens = layer({"tokens": tokens + torch.zeros((), requires_grad=True)}, chosen)
    return tokens


def repeated(layer: nn.Module, tokens: Tensor, chosen: Tensor) -> Tensor:
    return checkpoint(layer, tokens, chosen, use_reentrant=False)


CASES: dict[str, tuple[type[nn.Module], Any, Callable[..., None]]] = {
    "stacked experts": (Stacked, None, steps),
    "listed experts": (Listed, None, steps),
    "listed experts, accumulated": (Listed, None, accumulated),
    "listed experts, checkpoints": (Listed, repeated, steps),
    "evaluation between forward and backward": (Broken, None, evaluation_between),
    "layers in other orders": (Broken, None, in_other_orders),
    "two forwards in one loss": (Broken, None, both_at_once),
    "two forwards, then two backwards": (Broken, None, one_after_the_other),
    "changed without backward": (Broken, None, changed_without_backward),
    "a loss kept aside": (Broken, None, with_loss_aside),
    "two backwards": (Broken, None, twice),
    "gradient penalty": (Broken, None, penalized),
    "frozen layers": (Broken, None, frozen),
    "hooks of parameters": (Broken, None, with_hooks),
    "checkpoints": (Broken, repeated, steps),
    "reentrant checkpoints": (Broken, reentrant, collected),
    "a part checkpointed": (CheckpointsPart, None, steps),
    "a layer that calls itself": (CallsItself, None, steps),
    "gradients enabled inside": (EnablesGradients, None, without_outer_gradients),
    "a view changed in place": (ReturnsView, added_in_place, steps),
    "a rank without gradients": (OnOneRank, twice_in_dict, accumulated),
    "a method that calls the model": (Broken, None, generated),
    "other parameters between forward and backward": (Broken, None, replaced_for_evaluation),
    "tokens trained": (ReturnsArgument, second, of_trained_tokens),
    "threads": (Threads, None, steps),
    "list of parameters": (Sliced, None, steps),
}
EAGER_ONLY = ("gradient penalty", "threads")


def averaged(grad: Tensor | None) -> Tensor | None:
    """Return the mean of the ranks' gradients; None if no rank has one."""
    has = torch.tensor(float(grad is not None))  # on the default device
    dist.all_reduce(has)
    if not has:
        return None
    total = torch.zeros(()) if grad is None else grad
    shapes: list[Any] = [None, None]
    dist.all_gather_object(shapes, None if grad is None else tuple(grad.shape))
    total = total.expand(next(shape for shape in shapes if shape is not None)).contiguous()
    dist.all_reduce(total)
    return total / 2


def error(case: str, compiled: bool) -> float:
    """Return the largest difference of a gradient from that of the model that is not sharded, on the default device."""
    layer, how, program = CASES[case]
    torch.manual_seed(0)
    plain = Net(layer, how)
    net = copy.deepcopy(plain)
    mesh = init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("dp",))
    for each in net.layers:
        overlapc.fully_shard(each, mesh=mesh)
    overlapc.fully_shard(net, mesh=mesh)
    program(plain, plain)
    program(torch.compile(net, backend="overlapc") if compiled else net, net)
    largest = 0.0
    for (name, want), param in zip(plain.named_parameters(), net.parameters(), strict=True):
        mean = averaged(want.grad)
        assert (mean is None) == (param.grad is None), name
        if mean is not None:
            assert isinstance(param.grad, DTensor)
            largest = max(largest, float((param.grad.full_tensor() - mean).abs().max()))
    return largest


def errors(compiled: bool, device: str = "cpu") -> dict[str, float]:
    torch.set_num_threads(1)
    if device == "cuda":
        take_gpu()
    torch.set_default_device(device)
    cases = [case for case in CASES if not compiled or case not in EAGER_ONLY]
    # Models of one kind share graphs, which halves the time of this test. Dynamo would run a function of more than 8
    # graphs eagerly.
    with torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True):
        return {case: error(case, compiled) for case in cases}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_model_that_is_not_sharded(compiled: bool):
    for found in values_on_ranks(errors, 2, compiled, timeout_s=280):
        assert found
        assert {case: value for case, value in found.items() if value > 1e-6} == {}


def sizes_of_gathered(compiled: bool) -> list[int]:
    """Return the bytes of a layer's gathered weight in its forward, after it, and after backward."""
    seen: list[Tensor] = []

    class Noted(Broken):
        def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
            note(self)
            return super().forward(tokens, chosen)

    @torch._dynamo.disable
    def note(layer: Noted) -> None:
        seen.append(layer.up.weight)
        bytes_.append(seen[0].untyped_storage().nbytes())

    bytes_: list[int] = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = overlapc.fully_shard(Noted(), mesh=mesh, reshard_after_forward=True)
    loss = (torch.compile(net, backend="overlapc") if compiled else net)(*data()).sum()
    bytes_.append(seen[0].untyped_storage().nbytes())
    loss.backward()
    return [*bytes_, seen[0].untyped_storage().nbytes()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_holds_gathered_parameters_only_during_its_forward_and_backward(compiled: bool):
    for found in values_on_ranks(sizes_of_gathered, 2, compiled, timeout_s=120):
        assert found == [4 * 16 * WIDTH, 0, 0]


def left_after_steps(compiled: bool) -> tuple[int, int]:
    """Return how many forwards are alive after some steps, and the bytes that an evaluation leaves gathered."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = overlapc.fully_shard(Broken(), mesh=mesh, reshard_after_forward=True)
    model = torch.compile(net, backend="overlapc") if compiled else net
    for _ in range(3):
        model(*data()).sum().backward()
        del net.aside
    gc.collect()
    alive = sum(isinstance(each, Forward) for each in gc.get_objects())
    with torch.no_grad():
        model(*data())
    return alive, net._overlapc_all_gathered._full[managed(net.up)["weight"].key].local.untyped_storage().nbytes()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_steps_and_evaluations_leave_nothing_behind(compiled: bool):
    assert values_on_ranks(left_after_steps, 2, compiled, timeout_s=120) == [(0, 0)] * 2


def gathered_ahead(compiled: bool) -> list[list[str]]:
    """Return which of three layers are gathered in each layer's forward, and after the model's, for some forwards."""
    found: list[str] = []

    class Noted(Broken):
        def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
            note()
            return super().forward(tokens, chosen)

    @torch._dynamo.disable
    def note() -> None:
        known = [getattr(layer, "_overlapc_all_gathered", None) for layer in net.layers]
        full = [[] if each is None else each._full.values() for each in known]
        found.append("".join(str(at) for at in range(3) if any(each.is_current for each in full[at])))

    net = Net(Noted)
    net.layers.append(Noted())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in net.layers:
        overlapc.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    overlapc.fully_shard(net, mesh=mesh)
    model = torch.compile(net, backend="overlapc") if compiled else net
    forwards = []
    for net.order in [0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0]:
        with torch.no_grad():
            model(*data())
        note()
        forwards.append([*found])
        found.clear()
    return forwards


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forward_gathers_for_the_one_that_came_next_the_last_time(compiled: bool):
    first, second = ["0", "1", "2", ""], ["01", "12", "2", ""]
    without_1, again, without_2 = ["01", "2", ""], ["02", "2", ""], ["02", ""]
    expected = [first, second, without_1, again, without_2]
    assert values_on_ranks(gathered_ahead, 2, compiled, timeout_s=120) == [expected] * 2


def transformed() -> list[float]:
    """Return differences from the layer that is not sharded, in functions that torch.func transforms."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layer = overlapc.fully_shard(copy.deepcopy(plain), mesh=mesh)
    tokens, _ = data()
    functions: list[Callable[[Any], Tensor]] = [
        lambda model: torch.vmap(model)(tokens),
        lambda model: torch.func.grad(lambda tokens: model(tokens).sum())(tokens),
        lambda model: torch.func.jacrev(model)(tokens[0]),
        lambda model: torch.func.jvp(model, (tokens,), (tokens,))[1],
    ]
    return [float((function(plain) - function(layer)).detach().abs().max()) for function in functions]


def test_transforms_of_torch_func_call_sharded_modules():
    for differences in values_on_ranks(transformed, 2, timeout_s=60):
        assert max(differences) < 1e-6


class Writes(Broken):
    """A layer that changes a parameter in its forward."""

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        result = super().forward(tokens, chosen)
        with torch.no_grad():
            self.up.weight.clamp_(-0.01, 0.01)
        return result


def refusal(compiled: bool) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = overlapc.fully_shard(Writes(), mesh=mesh)
    with pytest.raises(overlapc.OverlapcError) as refused:
        (torch.compile(net, backend="overlapc") if compiled else net)(*data())
    assert isinstance(net.up.weight, DTensor)  # nothing stays gathered
    return str(refused.value)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forward_that_writes_into_a_gathered_parameter_is_refused(compiled: bool):
    for message in values_on_ranks(refusal, 2, compiled, timeout_s=60):
        assert message.startswith("a forward writes into up.weight, which is gathered again")


def sparse_result() -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    class Sparse(Broken):
        def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
            return super().forward(tokens, chosen).to_sparse()

    return int(overlapc.fully_shard(Sparse(), mesh=mesh)(*data())._nnz())


def test_a_result_without_memory_of_its_own_is_returned():
    assert values_on_ranks(sparse_result, 2, timeout_s=60) == [4 * WIDTH] * 2


def gradients_of_one_rank(compiled: bool) -> tuple[float, ...]:
    """Change in place the gradients of a sum of two parameters, which autograd makes of one gradient."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "dp"))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.one + self.two + tokens

    net = overlapc.fully_shard(Sum(), mesh=mesh["dp"])
    given = torch.ones(WIDTH)
    (torch.compile(net, backend="overlapc") if compiled else net)(torch.ones(WIDTH)).backward(given)
    for param in net.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    return tuple(float(each[0]) for each in (net.one.grad.to_local(), net.two.grad.to_local(), given))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_a_single_rank_have_memory_of_their_own(compiled: bool):
    assert values_on_ranks(gradients_of_one_rank, 2, compiled, timeout_s=60) == [(0.5, 0.5, 1.0)] * 2


def deleted() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    layer = overlapc.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    del layer.bias
    return hasattr(layer, "bias"), hasattr(layer, "weight")


def test_a_sharded_parameter_can_be_deleted():
    assert values_on_ranks(deleted, 2, timeout_s=60) == [(False, True)] * 2
