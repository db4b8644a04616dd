"""A model of transformers whose layers break the graph has causal attention, as if it ran eagerly."""

from __future__ import annotations

import pytest
import torch

import overlapc
from overlapc.report import record

transformers = pytest.importorskip("transformers")


def test_a_causal_mask_is_not_computed_between_graph_breaks() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="overlapc")
    tokens = torch.randint(64, (2, 16))
    padded = torch.ones(2, 16, dtype=torch.int64)
    padded[0, :4] = 0
    for mask, kind in ((None, "causal"), (padded, "masked")):
        record.clear()
        given = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        loss = compiled(**given).loss
        loss.backward()
        torch.testing.assert_close(loss, model(**given).loss)
        (step,) = overlapc.report().steps
        attention = [what for graph in step.graphs for what in graph.attention if "backward" not in what]
        assert [what.split(": ")[1] for what in attention] == [kind]
