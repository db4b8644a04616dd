"""Every node of a plan says which line of the user's it comes from, nodes that were made on the way included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overlapc.report import record


class Model(nn.Module):
    """Random numbers (seeds are drawn once, late), decompositions, an op with two gradients to add up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(9, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.linear(self.table(tokens)), 0.5)
        x = x + torch.rand_like(x)
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.norm(x + mixed).square().mean()


def test_nodes_made_late_have_a_line_too():
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
