"""Every node of a plan names the user's source line that it comes from, including nodes that the compiler added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from overlapc.lowering.provenance import provenance
from overlapc.parallel import access
from overlapc.report import record
from tests.codegen.interpreted import triton_on_cpu
from tests.lowering.against_eager import compiled

ACCESS = access.__file__  # whose frames lie between a sharded module's forward and the user's call


class Model(nn.Module):
    """A model with random numbers (whose seeds are drawn by a node added late), decompositions, and a value whose
    gradient is a sum of several."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(9, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.linear(self.table(tokens)), 0.5)
        x = x + torch.rand_like(x)
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.norm(x + mixed).square().mean()


def test_nodes_that_the_compiler_added_have_a_source_line():
    record.clear()
    step = torch.compile(Model(), backend="overlapc", options={"native": False, "warm_start": False})
    step(torch.randint(9, (2, 3, 5))).backward()
    graphs = record.report_of_process().steps[-1].graphs
    assert len(graphs) == 2
    for graph in graphs:
        nodes = [line for line in graph.schedule.splitlines() if " = " in line and " = input" not in line]
        assert len(nodes) > 10
        assert not [line for line in nodes if "test_provenance.py:" not in line.partition("  # ")[2]]
    assert "seeds" in graphs[0].schedule


@pytest.mark.parametrize(
    ("trace", "source"),
    [
        (f'  File "{ACCESS}", line 50, in __call__\n    output = super()\n', f"{ACCESS}:50: output = super()"),
        ('  File "a.py", line 3, in f\n    x = g(x)\n        ^^^^\n', "a.py:3: x = g(x)"),
        ('  File "a.py", line 3, in f\n  File "b c.py", line 4, in g\n    y()\n', "b c.py:4: y()"),
        ('  File "a.py", line 3, in f\n    x = g(x)\n  File "b.py", line 4, in g\n', "b.py:4: "),
        (
            f'  File "a.py", line 3, in f\n    x = m(x)\n  File "{ACCESS}", line 9, in get\n    return 1\n',
            "a.py:3: x = m(x)",
        ),
        ("", ""),
    ],
)
def test_the_source_line_is_the_innermost_frame_of_the_user(trace: str, source: str):
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["stack_trace"] = trace
    assert provenance(node).source == source


def test_a_fused_kernel_names_each_line_once(cache: Path):
    def function(x: Tensor) -> Tensor:
        y = x.exp() * x.cos()
        return y + 1

    with triton_on_cpu():
        compiled(function, cache_dir=str(cache), profile="cpu-gloo")(torch.randn(40))
    (heading,) = [text.split("\n")[0] for path in cache.rglob("*.py") if "exp" in (text := path.read_text())]
    assert [part.rpartition(": ")[2] for part in heading.split(" | ")[1:]] == ["y = x.exp() * x.cos()", "return y + 1"]
