"""One training step of small Hugging Face models with random weights, compared with eager.

    pytest tests/models

They take minutes and run only when named like this. Skipped where transformers is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from overlapc.runtime.counters import counted

T = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")

# How many of the attentions of a model of two layers keep their mask (a sliding window). All other masks are causal or
# let everything through, and are removed. Some releases of transformers pass no causal masks in the first place.
MASKS_KEPT = {"llama": 0, "qwen2": 0, "qwen3": 0, "gemma3": 1, "phi": 0, "gpt2": 0, "bert": 0, "modernbert": 1}
LABELS = torch.tensor([1, 3])
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
Inputs = dict[str, Tensor]


def language(model: str, **config: Any) -> tuple[nn.Module, Inputs]:
    """Return a model and its inputs; `model` names a causal, masked or sequence-to-sequence class of transformers."""
    family = model.removesuffix("ForCausalLM").removesuffix("ForMaskedLM").removesuffix("ForConditionalGeneration")
    family = family.removesuffix("LMHeadModel")
    tokens = torch.randint(3, 90, (2, 16))
    made = getattr(T, model)(getattr(T, f"{family}Config")(vocab_size=100, **config))
    return made, {"input_ids": tokens, "labels": tokens}


def gemma3() -> tuple[nn.Module, Inputs]:
    """Return a model with a layer whose window is shorter than the sequence and a layer without a window."""
    config = T.Gemma3TextConfig(
        vocab_size=100, num_key_value_heads=2, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], **SMALL,
    )  # fmt: skip
    tokens = torch.randint(3, 90, (2, 16))
    return T.Gemma3ForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def vision(model: str, size: int, **config: Any) -> tuple[nn.Module, Inputs]:
    family = model.removesuffix("ForImageClassification")
    made = getattr(T, model)(getattr(T, f"{family}Config")(num_labels=5, **config))
    return made, {"pixel_values": torch.randn(2, 3, size, size), "labels": LABELS}


def whisper() -> tuple[nn.Module, Inputs]:
    config = T.WhisperConfig(
        vocab_size=100, num_mel_bins=16, max_source_positions=20, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **SEQ2SEQ,
    )  # fmt: skip
    tokens = torch.randint(3, 90, (2, 16))
    made = T.WhisperForConditionalGeneration(config)
    return made, {"input_features": torch.randn(2, 16, 40), "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "llama": lambda: language("LlamaForCausalLM", num_key_value_heads=2, **SMALL),
    "qwen2": lambda: language("Qwen2ForCausalLM", num_key_value_heads=2, **SMALL),
    "qwen3": lambda: language("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8, **SMALL),
    "gemma3": gemma3,
    "gemma2": lambda: language("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, **SMALL),
    "phi": lambda: language("PhiForCausalLM", **SMALL),
    "gpt2": lambda: language(
        "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "opt": lambda: language(
        "OPTForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=64,
    ),
    "mamba": lambda: language("MambaForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=4),
    "mixtral": lambda: language("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **SMALL),
    "bert": lambda: language("BertForMaskedLM", **NO_DROPOUT, **SMALL),
    "modernbert": lambda: language(
        "ModernBertForMaskedLM", global_attn_every_n_layers=2, local_attention=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, **SMALL,
    ),
    "distilbert": lambda: language(
        "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0.0, attention_dropout=0.0
    ),
    "bart": lambda: language("BartForConditionalGeneration", max_position_embeddings=64, **SEQ2SEQ),
    "t5": lambda: language(
        "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    ),
    "whisper": whisper,
    "vit": lambda: vision("ViTForImageClassification", 32, image_size=32, patch_size=8, **NO_DROPOUT, **SMALL),
    "swin": lambda: vision(
        "SwinForImageClassification", 32, image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
        window_size=4, drop_path_rate=0.0, **NO_DROPOUT,
    ),
    "resnet": lambda: vision(
        "ResNetForImageClassification", 64, embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
        layer_type="basic",
    ),
    "convnext": lambda: vision(
        "ConvNextForImageClassification", 64, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]
    ),
}  # fmt: skip


def step(model: nn.Module, inputs: Inputs, call: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = call(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compiled_step(model: nn.Module, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return loss and gradients of a compiled step, and its number of graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, grads = step(model, inputs, torch.compile(model, backend="overlapc"))
    return loss, grads, sum(torch._dynamo.utils.counters["graph_break"].values())


def in_float64(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return eager's gradients in float64."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the grouped product of experts has no float64
    given = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    return step(exact, given, exact)[1]


def masks_given(model: nn.Module, inputs: Inputs) -> int:
    """Return how many attentions the model calls with a mask."""
    found: list[Any] = []

    def look(graph: GraphModule, _: Any) -> GraphModule:
        calls = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
        found.extend(mask for node in calls if (mask := (*node.args[3:4], node.kwargs.get("attn_mask"))[0]) is not None)
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=look)(**inputs)
    return len(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_eager(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    expected, wanted = step(model, inputs, model)
    loss, grads, broken = compiled_step(model, inputs)
    assert counted("kernels") > 20
    assert broken == 0
    if name in MASKS_KEPT:
        dropped = counted("attention_masks_causal") + counted("attention_masks_full")
        assert counted("attention_masks_kept") == MASKS_KEPT[name]
        assert dropped == masks_given(model, inputs) - MASKS_KEPT[name]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert grads.keys() == wanted.keys()
    exact = in_float64(model, inputs)
    for parameter, gradient in wanted.items():
        # Gradients that are zero up to rounding, such as those of biases of keys, are only as exact as eager's.
        eager_error = (gradient - exact[parameter]).norm().item()
        error = (grads[parameter] - exact[parameter]).norm().item()
        assert error <= max(1e-4 * gradient.norm().item(), 4 * eager_error), parameter


def test_a_step_in_bfloat16_whose_lengths_vary_equals_eager():
    torch.manual_seed(0)
    model, _ = MODELS["llama"]()
    model.to(torch.bfloat16).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="overlapc", dynamic=True)
    for length in (16, 23):
        tokens = torch.randint(3, 90, (2, length))
        inputs = {"input_ids": tokens, "labels": tokens}
        expected, wanted = step(model, inputs, model)
        loss, grads = step(model, inputs, compiled)
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
        for parameter, gradient in wanted.items():
            assert (grads[parameter] - gradient).norm() <= 3e-2 * gradient.norm(), parameter
    recognized, graphs = counted("attention_masks_causal"), counted("graphs")
    assert graphs == 2
    assert recognized == (2 if masks_given(model, inputs) else 0)
