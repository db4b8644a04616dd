"""The demo's Llama model and its data: shapes, causality, grouped heads, and how ranks divide one batch."""

from __future__ import annotations

import pytest
import torch

from overlapc.errors import ConfigError
from overlapc.launch import corpus
from overlapc.launch.llama import Llama, LlamaConfig, check_tensor_parallel, rotary_tables, rotate


@pytest.fixture(scope="module")
def model():
    made = Llama(LlamaConfig.tiny())
    made.reset_parameters(0)
    return made


def test_the_8b_model_has_the_sizes_of_llama_8b():
    with torch.device("meta"):
        model = Llama(LlamaConfig.llama_8b(layers=1, max_seq=8))
    per_layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
    assert per_layer == 218_112_000
    assert model.head.weight.shape == (32_000, 4096)


def test_the_demo_has_a_few_million_parameters():
    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 8e6


def test_an_untrained_model_predicts_uniformly(model):
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, tokens)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(5.545, abs=0.05)  # ln 256


def test_later_tokens_do_not_change_earlier_losses(model):
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20:] = 7
    ignored = torch.full_like(tokens, -100)  # the target that cross-entropy ignores
    targets = torch.where(torch.arange(32) < 20, tokens, ignored)
    assert torch.equal(model(tokens, targets), model(changed, targets))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cfg = LlamaConfig.tiny()
    cos, sin = rotary_tables(cfg)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(cfg.head_dim, generator=generator) for _ in range(2))
    turned = [rotate(vector.expand(1, 1, cfg.max_seq, -1), cos, sin)[0, 0] for vector in (query, key)]
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(cfg.max_seq))
    products = turned[0] @ turned[1].T
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(cfg.max_seq - 3))


@pytest.mark.parametrize(("change", "message"), [({"heads": 3}, "dim 32"), ({"kv_heads": 3}, "4 heads cannot share 3")])
def test_sizes_that_do_not_divide_are_an_error(change, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**{"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 64} | change)


def test_tensor_parallel_must_divide_the_model():
    check_tensor_parallel(LlamaConfig(), 4)
    with pytest.raises(ConfigError, match="--tp 8 does not divide the key-value heads"):
        check_tensor_parallel(LlamaConfig(), 8)


def test_parts_of_a_batch_are_the_rows_of_the_whole():
    whole = list(corpus.batches(2, batch=4, seq=16, part=0, parts=1))
    parts = [list(corpus.batches(2, batch=2, seq=16, part=part, parts=2)) for part in (0, 1)]
    for step, (tokens, targets) in enumerate(whole):
        assert torch.equal(tokens, torch.cat([part[step][0] for part in parts]))
        assert torch.equal(targets[:, :-1], tokens[:, 1:])


def test_the_corpus_is_python_source():
    assert len(corpus.read(100_000)) == 100_000
    assert corpus.read(100_000).startswith(corpus.read(1_000))
    assert b"def " in corpus.read(100_000)
