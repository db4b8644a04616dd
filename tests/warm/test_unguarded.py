"""Objects for which torch stores no guard are compared by name; the guards in these tests come from Dynamo."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._guards import Guard, TracingContext
from torch.fx import GraphModule

from overlapc.warm.unguarded import Named, Unguarded, named

HOME = __name__


def double(x: Tensor) -> Tensor:
    return x * 2


helper: Any = double
limit: Any = object()


def guards_of(function: Callable[..., Any], *inputs: Any) -> list[Guard]:
    """Return Dynamo's guards of `function` at the time when it calls the backend, after they were built."""
    found: list[Guard] = []

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        found.extend(TracingContext.get().guards_context.dynamo_guards)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found


def calls_helper(x: Tensor) -> Tensor:
    return helper(torch.nn.functional.relu(x))


@pytest.fixture
def of_helper(monkeypatch: pytest.MonkeyPatch) -> tuple[Named, ...]:
    return named(guards_of(calls_helper, torch.ones(2)), HOME)


def expect(names: tuple[Named, ...]) -> None:
    for each in names:
        each.expect(HOME)


def test_unchanged_objects_are_accepted(of_helper: tuple[Named, ...]):
    assert "G['helper']" in {each.expression for each in of_helper}
    expect(of_helper)


@pytest.mark.parametrize("other", [lambda x: x * 3, torch.relu, types, 5], ids=["function", "builtin", "module", "int"])
def test_another_object_behind_the_name_is_noticed(
    of_helper: tuple[Named, ...], other: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules[HOME], "helper", other)
    with pytest.raises(Unguarded, match=r"G\['helper'\] is .* and was function .*double"):
        expect(of_helper)


def test_two_lambdas_of_one_line_differ_by_their_code(monkeypatch: pytest.MonkeyPatch):
    lambdas = [lambda x: x * 2, lambda x: x * 3]
    monkeypatch.setattr(sys.modules[HOME], "helper", lambdas[0])
    names = named(guards_of(calls_helper, torch.ones(2)), HOME)
    monkeypatch.setattr(sys.modules[HOME], "helper", lambdas[1])
    with pytest.raises(Unguarded):
        expect(names)


def test_a_name_that_is_gone_is_noticed(of_helper: tuple[Named, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(sys.modules[HOME], "helper")
    with pytest.raises(Unguarded, match="cannot be looked up"):
        expect(of_helper)


def test_an_argument_that_is_guarded_by_identity_cannot_be_named():
    def calls(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    guards = guards_of(calls, double, torch.ones(2))
    with pytest.raises(Unguarded, match=r"which object L\['function'\] is"):
        named(guards, HOME)


def test_names_that_dynamo_adds_to_a_module_are_found():
    names = (
        Named("G['__import_torch_dot_nn_dot_functional'].relu", "function torch.nn.functional.relu"),
        Named("G['__builtins_dict___0']['len']", "builtin builtins.len"),
    )
    for each in names:
        with pytest.raises(Unguarded, match=f"is {each.identity}"):
            Named(each.expression, "something else").expect(HOME)
