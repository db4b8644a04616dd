"""Detect that a sharded module of a larger model is compiled alone, where nothing can hide its communication."""

from __future__ import annotations

from torch import fx

from overlapc.parallel.gather import param_of, unshard


def compiled_alone(graph: fx.Graph) -> bool:
    """Whether Dynamo's `graph` gathers only one sharded module's parameters and was captured inside that module."""
    found = ""
    for node in graph.find_nodes(op="call_function", target=unshard):
        given, key = node.args[:2]
        assert isinstance(given, fx.Node)
        param = param_of(str(key))
        path = param.group.paths[param.part]
        # Dynamo names an input after its path: l_self_modules_layers_modules_0_parameters_weight_.
        if not path or found not in ("", path) or "modules_" + path.replace(".", "_modules_") in given.name:
            return False
        found = path
    return found != ""
