"""Dynamo's paths of modules become the names that users know."""

from __future__ import annotations

import pytest

from overlapc.fx.source import clean_module


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers[0]", "layers.0"),
        ("L['fn'].3", "3"),
        ("L['args'][0].model.layers[1].mlp", "model.layers.1.mlp"),
        ("L['self'].layers.0.forward._torchdynamo_inline.__self__.up", "layers.0.up"),
        ("L['self']._modules['layers']._modules['0']._checkpoint_wrapped_module._modules['ffn']", "layers.0.ffn"),
        ("L['teacher'].layers.0", "teacher.layers.0"),
        ("list(dict.values(L['self'].blocks._modules))[1]", "blocks.1"),
        ("list(dict.values(list(dict.values(L['fn']._modules))[2]._modules))[0].norm", "2.0.norm"),
    ],
)
def test_dynamos_paths_become_names_of_modules(path, name):
    assert clean_module(path) == name
