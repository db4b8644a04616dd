"""transformers' models keep keys and values of each layer in a cache by default, also in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlapc.parallel import fully_shard
from overlapc.parallel.access import prepare_dynamo
from overlapc.runtime.counters import counted
from tests.worlds import fake_world

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **SIZES))


def gemma() -> Any:
    """Every second layer has a sliding window, and a cache of another kind. In Dynamo of torch 2.11 only the caches
    differ, which is noticed when the second layer fills its own: then each layer is traced."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.Gemma3TextConfig(num_hidden_layers=4, layer_types=kinds, sliding_window=4, **sizes)
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize(("make", "replayed"), [(llama, {2}), (gemma, {0, 2})])
@pytest.mark.usefixtures("fresh_dynamo")
def test_layers_that_fill_a_cache_are_traced_once_and_fill_it_as_eager_code_does(make: Any, replayed: set[int]) -> None:
    torch.manual_seed(0)
    model = make()
    tokens = torch.arange(8)[None]
    expected = model(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    prepare_dynamo(trace_once=True)  # other tests may have taken it back
    with fake_world(1):
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        before = counted("blocks_replayed")
        found = torch.compile(model, backend="overlapc")(input_ids=tokens, labels=tokens)
        assert counted("blocks_replayed") - before in replayed
        found.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss)
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert type(ours) is type(theirs)
            torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name])
