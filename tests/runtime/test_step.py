"""Steps without AOTAutograd's wrapper behave like any differentiable function under autograd."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.testing._internal.two_tensor import TwoTensor

from overlapc.backend import overlapc as overlapc_backend
from overlapc.errors import OverlapcError
from overlapc.runtime import support
from overlapc.runtime.collective_ops import gloo_all_gather
from overlapc.runtime.counters import counted
from overlapc.runtime.step import StepPlan, Tangent, step_function
from overlapc.warm.watch import of_plain_tensors
from tests.ranks import values_on_ranks


@pytest.fixture
def compiled(cache: Path):
    """Return a function that compiles twice, so that the second compilation takes the step from the cache."""

    def compile_warm(function: Any, *inputs: Tensor) -> Any:
        for _ in range(2):
            torch._dynamo.reset()
            options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo"}
            result = torch.compile(function, backend="overlapc", options=options)
            before = counted("steps_from_cache")
            outputs = result(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if any(output.requires_grad for output in outputs):
                sum(output.sum() for output in outputs if output.requires_grad).backward()
        assert counted("steps_from_cache") == before + 1
        for each in inputs:
            each.grad = None
        return result

    return compile_warm


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def test_gradients_are_right_for_every_input_and_tangent_layout(compiled):
    x, y = leaf(4, 6), leaf(6)
    frozen = torch.randn(4, 6)

    def function(x: Tensor, y: Tensor, frozen: Tensor) -> Tensor:
        return (x * y).sin() * frozen

    step = compiled(function, x, y, frozen)
    for grad in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.ones(1).expand(4, 6)):
        x.grad = y.grad = None
        step(x, y, frozen).backward(grad)
        expected = torch.autograd.grad(function(x, y, frozen), (x, y), grad)
        torch.testing.assert_close((x.grad, y.grad), expected)
    assert frozen.grad is None


def test_outputs_that_are_not_differentiated_have_zero_gradients(compiled):
    x = leaf(5)
    step = compiled(lambda x: (x.sin(), x.exp()), x)
    step(x)[1].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_integer_outputs_have_no_gradient(compiled):
    x = leaf(7)
    step = compiled(lambda x: (x.sin(), x.argmax(), (x > 0)), x)
    value, index, mask = step(x)
    assert value.requires_grad
    assert not index.requires_grad
    assert not mask.requires_grad
    assert index == x.argmax()
    value.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_step_without_gradients_is_cached(compiled):
    x = torch.randn(5)
    step = compiled(lambda x: x.sin() + 1, x)
    torch.testing.assert_close(step(x), x.sin() + 1)


def test_backward_may_be_repeated_only_if_asked_for(compiled):
    x = leaf(5)
    step = compiled(lambda x: x.sin(), x)
    loss = step(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_an_error_that_says_so(compiled):
    x = leaf(5)
    step = compiled(lambda x: x.sin(), x)
    (grad,) = torch.autograd.grad(step(x).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, x.cos())
    assert grad.requires_grad
    with pytest.raises(OverlapcError, match="first derivatives only"):
        grad.sum().backward()


def test_second_derivatives_of_some_inputs_are_an_error(compiled):
    x = leaf(5)
    step = compiled(lambda x: x.sin(), x)
    (grad,) = torch.autograd.grad(step(x).sum(), x, create_graph=True)
    with pytest.raises(OverlapcError, match="first derivatives only"):
        torch.autograd.grad(grad.square().sum() + x.sum(), x)


def test_autocast_is_in_the_graph_and_not_applied_again(compiled):
    a, b = leaf(8, 8), leaf(8, 8)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).float() + torch.ones(8, 8)

    with torch.autocast("cpu", torch.bfloat16):
        step = compiled(function, a, b)
        result = step(a, b)
        expected = function(a, b)
    assert result.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


def test_activations_are_freed_during_backward(compiled):
    """The caller of backward must not keep tensors alive that backward has read."""
    import weakref

    x = leaf(64, 64)
    seen: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(saved() is not None)
            return grad

    step = compiled(lambda x: (x @ x).sin(), x)
    result = step(Probe.apply(x))
    (product,) = [each for each in result.grad_fn.saved_tensors if each.data_ptr() != x.data_ptr()]
    saved = weakref.ref(product.untyped_storage())
    del product
    result.sum().backward()
    assert seen == [False]


def test_a_step_that_is_not_cached_runs_without_the_wrapper():
    x = leaf(5)
    options = {"warm_start": False, "native": False}
    step = torch.compile(lambda x: x.sin(), backend="overlapc", options=options)
    step(x).sum().backward()  # compiles forward and backward
    result = step(x)
    assert type(result.grad_fn).__name__ == "StepBackward"
    x.grad = None
    result.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_reads_in_a_no_grad_block_are_not_recorded():
    weight, x = leaf(4, 4), torch.randn(4, 4)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x @ weight

    step = torch.compile(function, backend="overlapc", options={"warm_start": False, "native": False})
    for _ in range(2):
        result = step(x)
        assert torch.is_grad_enabled()
        assert not result.requires_grad
        torch.testing.assert_close(result, function(x))


def test_a_function_called_without_gradients_may_enable_them():
    x = leaf(4)

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin()

    step = torch.compile(function, backend="overlapc", options={"native": False})
    for times in (1, 2, 3):  # the first call uses torch's wrapper
        with torch.no_grad():
            result = step(x)
            assert not torch.is_grad_enabled()
        result.sum().backward()
        torch.testing.assert_close(x.grad, times * x.detach().cos())


def sine() -> Any:
    """Return a step with one input and one output, made without a compiler."""

    def forward(arguments: list[Any]) -> tuple[Tensor, ...]:
        (x,) = arguments
        return x.sin(), x

    def backward(arguments: list[Any]) -> tuple[Tensor, ...]:
        x, grad = arguments
        return (grad * x.cos(),)

    tangent = Tangent(0, (5,), (1,), torch.float32, torch.device("cpu"))
    return step_function(StepPlan(1, (), (tangent,), trains=True, autocast=False), forward, backward)


def test_under_functorch_transforms_dynamo_runs_the_original_function(compiled):
    """Therefore a step need not check whether a functorch transform is active."""
    x = leaf(5)
    step = compiled(lambda x: x.sin(), x)
    for call in (torch.func.grad(lambda x: step(x).sum()), torch.func.vmap(torch.func.grad(step))):
        result = call(x)
        torch.testing.assert_close(result, x.cos())
        assert "StepBackward" not in _names_of(result)


def _names_of(result: Tensor) -> set[str]:
    """Return the names of all nodes of the autograd graph of `result`."""
    found: set[str] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(type(node).__name__)
            waiting += [each for each, _ in node.next_functions]
    return found


def test_hooks_on_saved_tensors_see_what_is_saved():
    x = leaf(5)
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: seen.append(saved) or saved * 2, lambda saved: saved / 2
    ):
        (result,) = sine()(x)
    assert len(seen) == 1
    result.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_gradients_are_freed_once_backward_has_read_them():
    """In torch 2.13, where the engine passes them in a list."""
    import weakref

    if not hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed"):
        pytest.skip("this torch holds gradients until backward returns")
    alive: list[bool] = []

    def backward(arguments: list[Any]) -> tuple[Tensor, ...]:
        _, grad = arguments
        arguments.clear()
        held = weakref.ref(grad.untyped_storage())
        del grad
        alive.append(held() is not None)
        return (torch.zeros(5),)

    tangent = Tangent(0, (5,), (1,), torch.float32, torch.device("cpu"))
    plan = StepPlan(1, (), (tangent,), trains=True, autocast=False)
    step = step_function(plan, lambda arguments: (arguments[0].sin(), arguments[0]), backward)
    x = leaf(5)
    (result,) = step(x)
    (result * 2).sum().backward()
    assert alive == [False]


@pytest.fixture
def dynamo_in_another_thread():
    """Run a thread that stays in Dynamo's frame evaluation during the test."""
    inside, done = threading.Event(), threading.Event()

    def stay() -> None:
        prior = set_eval_frame(False)
        inside.set()
        done.wait()
        set_eval_frame(prior)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    yield
    done.set()
    thread.join()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "beside-dynamo"])
def test_backward_reuses_the_memory_of_saved_tensors(
    cache: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, elsewhere: bool
):
    """But it does not reuse memory that a second backward or a hook still needs.

    elsewhere: another thread is in Dynamo, which then evaluates the frames of all threads. Dynamo also keeps evaluating
    frames after a compilation in which a backend raised (torch 2.11 to 2.13), as in other tests.
    """
    if elsewhere:
        request.getfixturevalue("dynamo_in_another_thread")
    x, weight = leaf(128, 128), torch.randn(128, 128)
    options = {"warm_start": False, "cache_dir": str(cache), "profile": "cpu-gloo"}

    def function(x: Tensor) -> Tensor:
        return (x @ weight).sin()

    step = torch.compile(function, backend="overlapc", options=options)
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    def gradient(result: Tensor, **options: Any) -> Tensor:
        (grad,) = torch.autograd.grad(result.sum(), x, **options)
        return grad

    torch.testing.assert_close(gradient(step(x)), expected)  # compiles
    taken: list[Tensor] = []
    take_over = support.take_over
    monkeypatch.setattr(support, "take_over", lambda source, *form: taken.append(source) or take_over(source, *form))
    result = step(x)
    for keeps in (True, True, False):
        torch.testing.assert_close(gradient(result, retain_graph=keeps), expected)
        assert bool(taken) != keeps
    taken.clear()

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        result = step(x)
    before = [each.clone() for each in kept]
    torch.testing.assert_close(gradient(result), expected)
    assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=True))
    assert not taken


@pytest.mark.parametrize("evaluates", [None, False], ids=["Python", "Dynamo"])
def test_references_are_counted_right_whoever_evaluates_frames(evaluates: bool | None):
    """Dynamo's frame evaluation holds one more reference to arguments."""

    def call(kept: list[Tensor], keep: bool) -> bool:
        source = torch.empty(4)
        if keep:
            kept.append(source)
        address = source.data_ptr()
        return support.reused(source, (4,), (1,), torch.float32).data_ptr() == address

    prior = set_eval_frame(evaluates)
    try:
        assert call([], False)
        assert not call([], True)
    finally:
        set_eval_frame(prior)


def test_swapping_the_frame_evaluator_loses_no_references():
    """As in backward, which on a GPU runs on its own thread."""

    def callback(*_: object) -> None:
        """Never called: no frame is entered while it is set."""

    def swap(times: int) -> None:
        for _ in range(times):
            prior = set_eval_frame(callback)
            evaluates = set_eval_frame(None)
            set_eval_frame(evaluates)
            set_eval_frame(prior)

    before = sys.getrefcount(callback)
    swap(1000)
    thread = threading.Thread(target=swap, args=(1000,))
    thread.start()
    thread.join()
    assert sys.getrefcount(callback) == before


def test_memory_that_a_collectives_thread_holds_is_not_reused_while_it_writes():
    taken = values_on_ranks(_taking_over_what_arrived, 2)
    assert all(sum(each) for each in taken), "no memory was reused, although gloo's thread releases it"


def _taking_over_what_arrived() -> list[bool]:
    """Return, for each gathered tensor, whether its memory was reused; assert that writes to that memory persist."""
    group, taken = dist.group.WORLD.group_name, []
    for number in range(200):
        arrived = gloo_all_gather(torch.full((1000,), float(number)), 2, group)
        torch.ops._c10d_functional.wait_tensor(arrived)
        assert (arrived == number).all()
        address = arrived.data_ptr()
        mine = support.reused(arrived, (2000,), (1,), torch.float32)
        taken.append(mine.data_ptr() == address)
        mine.fill_(-1)
        time.sleep(1e-4 * (number % 3))
        assert (mine == -1).all()
        del arrived, mine
    return taken


@pytest.mark.parametrize("wrapper", ["python", "fx"])
def test_results_may_be_changed_in_place(wrapper: str):
    """The result of a linear layer is a view of the matrix product, but must not appear as a view to the user."""
    x, weight = leaf(2, 3, 4), leaf(4, 4)
    options = {"warm_start": False, "native": False, "wrapper": wrapper}
    step = torch.compile(torch.nn.functional.linear, backend="overlapc", options=options)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight).add_(1).square().sum(), (x, weight))
    for _ in range(2):
        result = step(x, weight).add_(1)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), (x, weight)), expected)


def test_compiled_autograd_traces_steps(cache: Path):
    """Also if an earlier compilation without compiled autograd has cached the step."""
    x, weight = torch.randn(4, 4), leaf(4, 4)

    def train(x: Tensor) -> Tensor:
        loss = (x @ weight).sin().sum()
        loss.backward()
        return loss

    train(x)
    assert weight.grad is not None
    expected = weight.grad
    options = {"native": False, "warm_start": True, "cache_dir": str(cache), "profile": "cpu-gloo"}
    for traced in (False, True):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(compiled_autograd=traced):
            step = torch.compile(train, backend="overlapc", options=options)
            for _ in range(2):
                weight.grad = None
                step(x)
                torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("where", ["inside", "outside", "nowhere"])
def test_steps_of_tensor_subclasses_keep_torchs_wrapper(where: str):
    """torch 2.11 does not tell a backend which graphs involve DTensors."""
    captured: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        captured.append(of_plain_tensors(gm, inputs))
        return overlapc_backend(gm, inputs)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return TwoTensor(a.sin(), b.cos()) if where == "inside" else a.sin() * b

    torch._dynamo.reset()
    a, b = leaf(8, 4), leaf(8, 4)
    if where == "outside":
        a = TwoTensor(a.detach(), b.detach()).requires_grad_()
    result = torch.compile(function, backend=backend)(a, b)
    assert captured == [where == "nowhere"]
    expected = function(a, b)
    torch.testing.assert_close(result, expected)
    if where != "inside":  # a subclass's constructor has no gradient
        torch.testing.assert_close(torch.autograd.grad(result.sum(), a), torch.autograd.grad(expected.sum(), a))


def linear_and_more(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    product = torch.nn.functional.linear(x, weight)  # of two dims; returned as a view of three
    return product, (product * 2).sin()


@pytest.mark.parametrize("wrapper", ["python", "fx"])
@pytest.mark.parametrize("change", [lambda result: result.mul_(3), lambda result: result.detach().zero_()])
def test_backward_notices_that_a_result_was_changed_that_it_reads_in_another_form(change, wrapper: str):
    torch._dynamo.reset()
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    step = torch.compile(linear_and_more, backend="overlapc", options={"wrapper": wrapper})
    for _ in range(2):  # the second call runs without AOTAutograd's wrapper
        result, other = step(x, weight)
        change(result)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            other.sum().backward()
