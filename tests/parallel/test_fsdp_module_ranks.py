"""FSDP2's methods that trainers call give the same losses, gradients and collectives on an adopted module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import overlapc
import overlapc.parallel
from tests.parallel.sharded import shard
from tests.parallel.tiny import Tiny
from tests.ranks import values_on_ranks

MICRO = 3
Program = Callable[[Any, DeviceMesh], list[Tensor]]


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [tuple(torch.randint(24, (2, 5), generator=generator) for _ in range(2)) for _ in range(MICRO)]  # type: ignore


def in_place(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like Hugging Face's Trainer: accumulate gradients and scale the loss in place, which FSDP2 itself does not
    allow."""
    ours = isinstance(getattr(model, "_orig_mod", model), overlapc.parallel.FSDPModule)
    losses = []
    for number, batch in enumerate(micro_batches()):
        model.set_requires_gradient_sync(number == MICRO - 1)
        loss = model(*batch)
        if ours:
            loss *= 0.5
        else:
            loss = loss * 0.5
        loss.backward()
        losses.append(loss.detach())
    return losses


def each_module(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like Lightning Fabric: set gradient reduction on each module separately."""
    losses = []
    for number, batch in enumerate(micro_batches()):
        for module in model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.set_requires_gradient_sync(number == MICRO - 1, recurse=False)
        losses.append(model(*batch))
        losses[-1].backward()
    return losses


def late(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Switch reduction on between a forward and its backward, which then also reduces the accumulated gradients."""
    model.set_requires_gradient_sync(False)
    losses = [model(*micro_batches()[0])]
    losses[0].backward()
    losses.append(model(*micro_batches()[1]))
    model.set_requires_gradient_sync(True)
    losses[1].backward()
    return losses


def chunked_head(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like torchtitan's chunked loss: call the head for each chunk, but gather and reduce its parameters once."""
    head, hidden = model.head, torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):  # the parameters change in between
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
        for number, part in enumerate(hidden.chunk(MICRO)):
            if number == MICRO - 1:
                head.set_requires_gradient_sync(True, recurse=False)
            losses.append(head(part).float().square().mean())
            losses[-1].backward()
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)
        head.reshard()
        with torch.no_grad():
            head.weight.mul_(0.5)
    return losses


def prefetched(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Call `unshard` without `reshard`: forward and backward must free the gathered parameters, so that no step reads
    stale ones."""
    losses = []
    for step in range(3):
        handle = model.unshard(async_op=True)
        handle.wait()
        losses.append(model(*micro_batches()[step]))
        losses[-1].backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    return losses


def pipelined(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Run torch's pipeline schedule, which disables reduction for each backward and reduces at the end itself."""
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    losses: list[Tensor] = []
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    Schedule1F1B(stage, 2, loss_fn=F.mse_loss).step(hidden, target=hidden.flip(0), losses=losses)
    return losses


def recovered(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Run a step that fails during accumulation and then a step that succeeds: only the latter gives gradients."""
    if isinstance(model, overlapc.parallel.FSDPModule):
        model.set_requires_gradient_sync(False)
        model(*micro_batches()[0]).backward()
        with pytest.raises(IndexError):
            model(torch.full((2, 5), 999), micro_batches()[0][1])
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
    loss = model(*micro_batches()[1])
    loss.backward()
    return [loss]


def method(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Call a method that was registered as a forward method and that reads parameters directly."""
    return accumulated(model, lambda tokens: model.encode(tokens))


def within_forward(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Call the model, whose forward calls a method that was registered as a forward method."""
    return accumulated(model, model)


def by_parts(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Call the modules inside the model, not the model itself."""
    losses = []
    for number in range(MICRO):
        model.set_requires_gradient_sync(number == MICRO - 1)
        generator = torch.Generator().manual_seed(MICRO * dist.get_rank() + number)
        losses.append(model.translate(torch.randn(4, 8, generator=generator)).square().mean())
        losses[-1].backward()
    return losses


def accumulated(model: Any, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    losses = []
    for number, (tokens, _) in enumerate(micro_batches()):
        model.set_requires_gradient_sync(number == MICRO - 1)
        scores = call(tokens)
        assert scores.dtype == torch.float64
        losses.append(scores.square().mean())
        losses[-1].backward()
    return losses


def one_of_two_results(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like prime-rl's trainer: accumulate gradients of one result of a head whose other result must not have one."""
    ours = isinstance(model, overlapc.parallel.FSDPModule)
    losses = []
    for number, (tokens, _) in enumerate(micro_batches()):
        model.set_requires_gradient_sync(number == MICRO - 1)
        scores, _ = model(tokens)
        if ours:
            scores *= 0.5
        else:
            scores = scores * 0.5
        losses.append(scores.square().mean())
        losses[-1].backward()
    return losses


class Scores(torch.autograd.Function):
    """Reads which of its results have a gradient, so that Dynamo does not trace it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x @ weight.sum(0), x.amax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_largest: Tensor | None) -> tuple[Tensor, Tensor]:
        assert of_largest is None
        x, weight = ctx.saved_tensors
        return gradient.unsqueeze(-1) * weight.sum(0), (gradient.flatten() @ x.flatten(0, -2)).expand_as(weight)


class Scoring(Tiny):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return Scores.apply(self.embed(tokens), self.head.weight)


class Encoding(Tiny):
    def encode(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) @ self.head.weight.T

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.encode(tokens)


class EncodingEagerly(Encoding):
    @torch._dynamo.disable
    def normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def encode(self, tokens: Tensor) -> Tensor:
        return self.normed(self.embed(tokens)) @ self.head.weight.T


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.temperature = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(2))

    def translate(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).relu())


class Scored(Tiny):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if targets is None:
            return logits.argmax(-1)
        scores = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        torch._dynamo.graph_break()
        return {"loss": scores.mean(), "scores": scores}


def from_the_last_output(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like TRL's SFTTrainer: the loss is computed from another output than the model's first one. Before the last
    micro-batch the model predicts, which has no backward."""
    losses = []
    for number, batch in enumerate(micro_batches()):
        model.set_requires_gradient_sync(number == MICRO - 1)
        if number == MICRO - 1:
            model(batch[0])
        losses.append(model(*batch)["scores"].square().mean())
        losses[-1].backward()
    return losses


def twice(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Forwards after accumulation of which no backward runs, and two of which one backward runs: the accumulated
    gradients are reduced once, by the first backward."""
    first, second, third = micro_batches()
    model.set_requires_gradient_sync(False)
    model(*first).backward()
    model.set_requires_gradient_sync(True)
    dropped = model(*second)
    loss = model(*second) + 2 * model(*third)
    loss.backward()
    return [dropped, loss]


def eager(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="overlapc", options={"rank_timeout": 60})


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="overlapc", options={"rank_timeout": 60})
    return model


def compiled_parts(model: Any) -> Any:
    for part in model.children():
        part.compile(backend="overlapc", options={"rank_timeout": 60})
    return model


def compiled_translation(model: Any) -> Any:
    model.translate = torch.compile(model.translate, backend="overlapc", options={"rank_timeout": 60})
    return model


def compiled_method(model: Any) -> Any:
    model.encode = torch.compile(model.encode, backend="overlapc", options={"rank_timeout": 60})
    return model


def tiny(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    return shard(Tiny(layers=1), mesh["dp"], apply=fsdp2.fully_shard)


def repeated(mesh: DeviceMesh) -> Any:
    """Call one layer twice: it reduces the accumulated gradients in the backward of one call only."""
    model = tiny(mesh)
    model.layers.append(model.layers[0])
    return model


def with_head(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = Tiny(layers=1)
    fsdp2.fully_shard(model.head, mesh=mesh["dp"])
    return shard(model, mesh["dp"], apply=fsdp2.fully_shard)


def scored(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    return shard(Scored(layers=1), mesh["dp"], apply=fsdp2.fully_shard)


def scoring(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    return shard(Scoring(layers=1), mesh["dp"], apply=fsdp2.fully_shard)


def with_method(mesh: DeviceMesh, kind: type[Encoding] = Encoding) -> Any:
    torch.manual_seed(0)
    policy = fsdp2.MixedPrecisionPolicy(output_dtype=torch.float64)
    model = fsdp2.fully_shard(kind(), mesh=mesh["dp"], mp_policy=policy)
    fsdp2.register_fsdp_forward_method(model, "encode")
    return model


def translating(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = Translating()
    for module in (*model.children(), model):
        fsdp2.fully_shard(module, mesh=mesh["dp"])
    return model


def stage(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    for module in (model[0], model):
        fsdp2.fully_shard(module, mesh=mesh["dp"])
    return model


def of_inputs(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Like adversarial training: ask for the gradient of an input alone between a micro-batch whose gradients are held
    back and the one that reduces them."""
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    model.set_requires_gradient_sync(False)
    losses = [model(hidden).square().mean()]
    losses[0].backward()
    model.set_requires_gradient_sync(True)
    hidden = hidden.flip(0).requires_grad_()
    (grad,) = torch.autograd.grad(model(hidden).square().mean(), hidden)
    losses.append(model(hidden.detach() + grad.sign() / 8).square().mean())
    losses[1].backward()
    return losses


def of_some_parameters(model: Any, mesh: DeviceMesh) -> list[Tensor]:
    """Let the last micro-batch accumulate gradients of some parameters only."""
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    model.set_requires_gradient_sync(False)
    losses = [model(hidden).square().mean()]
    losses[0].backward()
    model.set_requires_gradient_sync(True)
    losses.append(model(hidden.flip(0)).square().mean())
    losses[1].backward(inputs=list(model.parameters())[-2:])
    return losses


CASES: dict[str, tuple[Callable[[DeviceMesh], Any], Program, Callable[[Any], Any]]] = {
    "in place, eager": (tiny, in_place, eager),
    "in place, compiled": (tiny, in_place, compiled),
    "in place, model.compile": (tiny, in_place, compiled_in_place),
    "each module, eager": (tiny, each_module, eager),
    "each module, compiled": (tiny, each_module, compiled),
    "each module, one called twice": (repeated, each_module, compiled),
    "late, eager": (tiny, late, eager),
    "late, compiled": (tiny, late, compiled),
    "parts, eager": (translating, by_parts, eager),
    "parts, compiled one by one": (translating, by_parts, compiled_parts),
    "parts, compiled together": (translating, by_parts, compiled_translation),
    "chunked head": (with_head, chunked_head, eager),
    "prefetched, eager": (tiny, prefetched, eager),
    "prefetched, compiled": (tiny, prefetched, compiled),
    "recovered, eager": (tiny, recovered, eager),
    "pipelined, eager": (stage, pipelined, eager),
    "pipelined, model.compile": (stage, pipelined, compiled_in_place),
    "last output, eager": (scored, from_the_last_output, eager),
    "last output, model.compile": (scored, from_the_last_output, compiled_in_place),
    "twice, eager": (tiny, twice, eager),
    "twice, compiled": (tiny, twice, compiled),
    "one of two results, model.compile": (scoring, one_of_two_results, compiled_in_place),
    "of inputs, eager": (stage, of_inputs, eager),
    "of inputs, compiled": (stage, of_inputs, compiled),
    "of some parameters, eager": (stage, of_some_parameters, eager),
    "of some parameters, model.compile": (stage, of_some_parameters, compiled_in_place),
    "method, eager": (with_method, method, eager),
    "method, compiled": (with_method, method, compiled_method),
    "method with eager code, compiled": (partial(with_method, kind=EncodingEagerly), method, compiled_method),
    "method within forward, model.compile": (with_method, within_forward, compiled_in_place),
}


class Collectives(TorchDispatchMode):
    """Counts all-gathers and reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        self.gathers += name in ("_allgather_base_", "all_gather_into_tensor_out")
        self.reductions += name in ("_reduce_scatter_base_", "reduce_scatter_tensor")
        return func(*args, **(kwargs or {}))


def seen(model: Any, program: Program, mesh: DeviceMesh) -> tuple[list[float], dict[str, Tensor], tuple[int, int]]:
    counted = Collectives()
    with counted if program is chunked_head else contextlib.nullcontext():  # under a mode, Dynamo does not compile
        losses = program(model, mesh)
    grads = {
        name.removeprefix("_orig_mod."): param.grad.full_tensor()
        for name, param in model.named_parameters()
        if isinstance(param.grad, DTensor)
    }
    return [float(loss.detach()) for loss in losses], grads, (counted.gathers, counted.reductions)


def run(case: str, mesh: DeviceMesh, eagers: dict[Any, Any]) -> dict[str, Any]:
    """Run a case beside eager FSDP2, whose results are in `eagers` if an earlier case had the same model and program.

    Dynamo is not reset: cases share graphs of equal models.
    """
    make, program, how = CASES[case]
    if (make, program) not in eagers:
        eagers[make, program] = seen(make(mesh), program, mesh)
    want, want_grads, want_counts = eagers[make, program]
    got, grads, counts = seen(how(overlapc.adopt_fsdp2(make(mesh))), program, mesh)
    assert list(grads) == list(want_grads)
    return {
        "losses": max(abs(a - b) for a, b in zip(got, want, strict=True)),
        "grads": max(float((grads[name] - want_grads[name]).abs().max()) for name in grads),
        "counts": (counts, want_counts),
    }


def work(cases: list[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    model = overlapc.adopt_fsdp2(tiny(mesh))
    copied = copy.deepcopy(model)
    eagers: dict[Any, Any] = {}
    # Beyond the limit Dynamo would run models eagerly: that is an error.
    with torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True):
        found: dict[str, Any] = {case: run(case, mesh, eagers) for case in cases}
    found["slice"] = type(overlapc.adopt_fsdp2(stage(mesh))[:1])
    found["is one"] = [isinstance(module, fsdp2.FSDPModule) for module in (model, model.layers[0], copied, model.norm)]
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return values_on_ranks(work, 2, list(CASES), timeout_s=280)


@pytest.mark.parametrize("case", CASES)
def test_calls_of_trainers_have_the_same_effect_as_with_fsdp2(outcomes: list[dict[str, Any]], case: str):
    for outcome in outcomes:
        assert outcome[case]["losses"] < 1e-5
        assert outcome[case]["grads"] < 1e-5


def test_an_adopted_module_is_an_instance_of_fsdpmodule(outcomes: list[dict[str, Any]]):
    for outcome in outcomes:
        assert outcome["slice"] is nn.Sequential
        assert outcome["is one"] == [True, True, True, False]


def test_a_chunked_heads_parameters_are_gathered_once_and_its_gradients_reduced_once(outcomes: list[dict[str, Any]]):
    for outcome in outcomes:
        assert outcome["chunked head"]["counts"] == ((2, 2), (2, 2))
