"""Compiles a graph of forward, loss and backward that the caller traced, as torchtitan's graph_trainer does."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from overlapc.compilation import stages
from overlapc.compilation.tracing import step_of
from overlapc.config import Config
from overlapc.fx.graph_copy import copied
from overlapc.warm.loading import next_number


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> fx.GraphModule:
    """Compile `gm`. Return a module with the same inputs and results.

    gm: a function of plain tensors that make_fx traced, with functional collectives and with its backward included:
        nothing is differentiated here. Nodes whose `meta["custom"]["module_fqn"]` names a module give collectives their
        names and buckets; gathers of inputs and reductions of results are treated as those of sharded parameters.
    example_inputs: one for each placeholder, real or fake. options, mode: as for `torch.compile`.

    Raises ConfigError for invalid options, CompileError with the FX node for a graph that cannot be compiled,
    RanksDisagree when ranks compile different graphs.
    """
    config = Config.of(options, mode)
    is_single = isinstance(gm.graph.output_node().args[0], fx.Node)  # AOTAutograd takes only graphs that return tuples
    if is_single:
        gm = fx.GraphModule(gm, copied(gm.graph))
        output = gm.graph.output_node()
        output.args = ((output.args[0],),)
        gm.recompile()
    with torch.no_grad():
        step = step_of(stages.compile_graph, gm, list(example_inputs), config, next_number())
    root = nn.Module()
    root.compiled = _Compiled(step)
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(str(node.target)) for node in gm.graph.find_nodes(op="placeholder"))
    results = graph.call_module("compiled", inputs)
    graph.output(graph.call_function(operator.getitem, (results, 0)) if is_single else results)
    return fx.GraphModule(root, graph)


class _Compiled(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    @torch.no_grad()
    def forward(self, *inputs: Any) -> Any:
        return self.step(*inputs)
