"""The error for a graph that cannot be lowered names the FX node and the user's source line."""

from __future__ import annotations

import linecache

import pytest
import torch

from overlapc.errors import CompileError
from overlapc.lowering import table
from tests.lowering.against_eager import compiled


@pytest.mark.parametrize("error", [AssertionError, KeyError, TypeError, ValueError])
def test_a_failing_lowering_names_node_and_line(monkeypatch, error):
    def broken(context, x):
        raise error("this rule is broken")

    def function(x):
        return (x + 1).sin() * 2  # the line of the error

    monkeypatch.setitem(table._rules, torch.ops.aten.sin.default, broken)
    with pytest.raises(CompileError) as caught:
        compiled(function)(torch.randn(3))
    message = str(caught.value)
    assert "cannot lower sin = aten.sin.default" in message
    assert f"{error.__name__}: " in message
    line = next(at for at, text in enumerate(linecache.getlines(__file__), 1) if "the line of the error" in text)
    assert f"test_errors.py:{line}: return (x + 1).sin() * 2" in message
    assert "hint: " in message


def test_an_op_whose_rule_cannot_lower_it_becomes_a_call(monkeypatch):
    def unable(context, x):
        context.pointwise(lambda value: value, x)  # must be undone when the rule fails
        raise table.Impossible("not this one")

    monkeypatch.setitem(table._rules, torch.ops.aten.sin.default, unable)
    x = torch.randn(3)
    torch.testing.assert_close(compiled(lambda x: x.sin() + 1)(x), x.sin() + 1)


def test_registering_a_second_rule_for_an_op_is_an_error():
    with pytest.raises(AssertionError, match="lowered twice"):
        table.lowers(torch.ops.aten.sin.default)(lambda context, x: x)
